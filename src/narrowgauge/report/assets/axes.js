// Axes: scales between numbers and pixels, and ticks.

function linearScale(low, high, from, to) {
  const span = high - low || 1;
  const scale = (value) => from + ((value - low) / span) * (to - from);
  scale.invert = (pixel) => low + ((pixel - from) / (to - from || 1)) * span;
  scale.ticks = (wanted) => linearTicks(low, high, wanted);
  return scale;
}

const wholeTicks = (ticks) => ticks.filter((value) => Number.isInteger(value));

function logScale(low, high, from, to) {
  const [a, b] = [Math.log10(low), Math.log10(high)];
  const inner = linearScale(a, b === a ? a + 1 : b, from, to);
  const scale = (value) => inner(Math.log10(Math.max(value, 1e-300)));
  scale.invert = (pixel) => 10 ** inner.invert(pixel);
  scale.ticks = (wanted) => logTicks(low, high, wanted);
  return scale;
}

function linearTicks(low, high, wanted) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / Math.max(wanted, 1);
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((one) => one * size >= rough) * size;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1)
    ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

// Ticks for bytes at powers of two.
function byteTicks(high, wanted) {
  const rough = high / Math.max(wanted, 1);
  const step = 2 ** Math.ceil(Math.log2(rough));
  const ticks = [];
  for (let value = 0; value <= high; value += step) ticks.push(value);
  return ticks;
}

function logTicks(low, high, wanted) {
  const decades = Math.log10(high) - Math.log10(low);
  const every = Math.max(1, Math.ceil(decades / Math.max(wanted, 1)));
  const within = decades < wanted / 2.5 ? [1, 2, 5] : decades < wanted ? [1, 3] : [1];
  const ticks = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1) {
    if (e % every !== 0 && within.length === 1) continue;
    for (const one of within) {
      const value = one * 10 ** e;
      if (value >= low * 0.999999 && value <= high * 1.000001) ticks.push(value);
    }
  }
  return ticks.length > 1 ? ticks : linearTicks(low, high, wanted).filter((value) => value > 0);
}

// An SVG group that is clipped to a box.
let clips = 0;
function makeClipGroup(box) {
  clips += 1;
  const id = `clip-${clips}`;
  const shape = svg("rect", {
    x: box.left,
    y: box.top,
    width: Math.max(box.right - box.left, 0),
    height: box.bottom - box.top,
  });
  return svg("g", { "clip-path": `url(#${id})` }, svg("clipPath", { id }, shape));
}

// The axes at the bottom and left of a plot, with their grid.
function axes(box, x, y, options) {
  const group = svg("g");
  const grid = svg("g", { class: "grid" });
  const axis = svg("g", { class: "axis" }, svg("path", { d: `M${box.left},${box.top}V${box.bottom}H${box.right}` }));
  for (const tick of y.ticks(Math.max(2, Math.floor((box.bottom - box.top) / 46)))) {
    const at = Math.round(y(tick)) + 0.5;
    if (at < box.top - 1 || at > box.bottom + 1) continue;
    grid.append(svg("line", { x1: box.left, x2: box.right, y1: at, y2: at }));
    group.append(svg("text", { x: box.left - 7, y: at + 4, "text-anchor": "end" }, options.yText(tick)));
  }
  for (const tick of x.ticks(Math.max(3, Math.floor((box.right - box.left) / 80)))) {
    const at = Math.round(x(tick)) + 0.5;
    if (at < box.left - 1 || at > box.right + 1) continue;
    axis.append(svg("line", { x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4 }));
    const anchor = at > box.right - 18 ? "end" : "middle";
    group.append(
      svg(
        "text",
        { x: anchor === "end" ? box.right : at, y: box.bottom + 17, "text-anchor": anchor },
        options.xText(tick),
      ),
    );
  }
  if (options.xLabel)
    group.append(svg("text", { x: box.right, y: box.bottom + 33, "text-anchor": "end" }, options.xLabel));
  if (options.yLabel) group.append(svg("text", { x: box.left, y: box.top - 8 }, options.yLabel));
  return [grid, axis, group];
}
