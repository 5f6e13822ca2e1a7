// The roofline of a GPU with a model's layers, and its memory hierarchy from the registers to HBM.

const ROOFS = ["fp32", "tf32", "fp16", "bf16", "fp8"];

// The format a recipe or a layer computes in, if this GPU supports it, or else its fastest format.
function formatOn(gpu, text) {
  const named = ROOFS.find((name) => text.toLowerCase().startsWith(name));
  return named && gpu.peaks[named] ? named : ROOFS.filter((name) => gpu.peaks[name]).pop();
}

// The position of a layer: at the rate of its predicted time, or at the roof if no time is known.
function placeLayer(layer, gpu, format) {
  const peak = gpu.peaks[layer.format ? formatOn(gpu, layer.format) : format];
  const roof = Math.min(peak, layer.intensity * gpu.bandwidth);
  const rate = layer.ms && layer.flops ? Math.min(layer.flops / (layer.ms / 1e3), roof) : roof;
  const under = layer.intensity * gpu.bandwidth < peak ? "memory" : "arithmetic";
  const bound = layer.ms && layer.bound ? layer.bound.replace("compute", "arithmetic") : under;
  const about = [layer.kind, layer.phase].filter(Boolean).join(", ");
  return { ...layer, rate, bound, name: about ? `${layer.name} (${about})` : layer.name };
}

// layers: {name, intensity, flops, bytes, ms, measured_ms, format, bound, kind, phase}
function rooflineChart(id, gpu, layers, format) {
  const label = `Roofline of ${gpu.name} with ${layers.length} layers`;
  const plot = el("div", {
    class: "plot",
    role: "img",
    "aria-label": label,
    "data-chart": id,
    id: `plot-${id}`,
    tabindex: "0",
  });
  const readout = el("p", { class: "readout", "aria-live": "polite" });
  const formats = ROOFS.filter((name) => gpu.peaks[name]);
  // Operations with hardly any arithmetic would stretch the axes over ten decades: they are only in the table.
  const all = layers.filter((layer) => layer.intensity > 0).map((layer) => placeLayer(layer, gpu, format));
  const points = all.filter((layer) => layer.intensity >= 0.02 && layer.rate >= gpu.bandwidth * 0.002);
  const hint = points.length ? "Hover over a layer, or use the arrow keys." : "";
  let current = null;

  drawWithin(plot, (width) => {
    const height = 330;
    const box = { left: 62, right: width - 12, top: 26, bottom: height - 40 };
    const intensities = points.map((point) => point.intensity);
    const ridge = Math.max(...formats.map((name) => gpu.peaks[name] / gpu.bandwidth));
    const x = logScale(
      Math.min(0.25, ...intensities),
      Math.max(ridge * 40, ...intensities.map((one) => one * 1.5)),
      box.left,
      box.right,
    );
    const lowest = Math.min(gpu.bandwidth * x.invert(box.left), ...points.map((point) => point.rate));
    const y = logScale(lowest * 0.8, Math.max(...formats.map((name) => gpu.peaks[name])) * 1.8, box.bottom, box.top);
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
    drawing.append(
      ...axes(box, x, y, {
        xText: (v) => number(v),
        yText: (v) => large(v),
        xLabel: "intensity, FLOP per byte of memory",
        yLabel: "FLOP/s",
      }),
    );
    const left = x.invert(box.left);
    const before = new Set();
    drawing.append(
      svg("path", {
        class: "roof",
        stroke: "var(--faint)",
        d: `M${box.left},${y(gpu.bandwidth * left)}L${x(ridge)},${y(gpu.bandwidth * ridge)}`,
      }),
    );
    for (const name of formats) {
      const top = gpu.peaks[name];
      const corner = top / gpu.bandwidth;
      const index = ROOFS.indexOf(name);
      const strong = name === format;
      drawing.append(
        svg("path", {
          class: "roof",
          stroke: color(index),
          opacity: strong ? 1 : 0.5,
          d: `M${x(corner)},${y(top)}H${box.right}`,
        }),
      );
      const sameRoof = formats.filter((other) => gpu.peaks[other] === top);
      if (before.has(top)) continue;
      before.add(top);
      drawing.append(
        svg(
          "text",
          { class: sameRoof.includes(format) ? "strong" : null, x: box.right - 2, y: y(top) - 5, "text-anchor": "end" },
          `${sameRoof.map((one) => one.toUpperCase()).join(", ")} ${large(top)}`,
        ),
        svg(
          "circle",
          { class: "ridge", cx: x(corner), cy: y(top), r: 3 },
          svg("title", {}, `ridge ${number(corner, 3)}`),
        ),
        svg("text", { x: x(corner) - 8, y: y(top) + 4, "text-anchor": "end" }, number(corner, 3)),
      );
    }
    const heaviest = Math.max(...points.map((point) => point.flops || 1), 1);
    points.forEach((point, index) => {
      const dot = svg("circle", {
        class: "dot",
        cx: x(point.intensity),
        cy: y(point.rate),
        r: 4 + 6 * Math.sqrt((point.flops || 0) / heaviest),
        "data-layer": point.name,
        fill: boundColor(point.bound),
        opacity: current === null || current === index ? 0.85 : 0.35,
      });
      dot.addEventListener("pointerenter", () => showLayer(index));
      drawing.append(dot);
    });
    plot.replaceChildren(drawing);
  });

  function showLayer(index) {
    const changed = index !== current;
    current = index;
    const point = points[index];
    readout.replaceChildren(
      el("b", {}, point.name),
      ` ${number(point.intensity, 3)} FLOP/byte, ${large(point.flops, "FLOP")}: at most `,
      el("b", {}, large(point.rate, "FLOP/s")),
      `, bound by ${point.bound}`,
      point.ms ? `; ${number(point.ms, 3)} ms predicted` : "",
      point.measured_ms ? `, ${number(point.measured_ms, 3)} ms measured in isolation` : "",
    );
    if (changed) plot.refresh();
  }
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!move || !points.length) return;
    event.preventDefault();
    showLayer(((current === null ? (move > 0 ? -1 : 0) : current) + move + points.length) % points.length);
  });
  readout.textContent = hint;
  const key = points.length
    ? el(
        "ul",
        { class: "legend" },
        [...new Set(points.map((point) => point.bound))]
          .sort()
          .map((bound) =>
            el(
              "li",
              { class: "still" },
              el("span", { class: "swatch", style: { background: boundColor(bound) } }),
              `bound by ${bound}`,
            ),
          ),
      )
    : null;
  const timed = all.some((point) => point.measured_ms);
  const columns = ["layer", "FLOP", "bytes", "FLOP/byte", "bound by", "max FLOP/s"];
  if (timed) columns.push("ms", "ms in isolation");
  const rows = all.map((point) => [
    point.name,
    large(point.flops),
    bytes(point.bytes),
    number(point.intensity, 3),
    point.bound,
    large(point.rate),
    ...(timed ? [number(point.ms, 3), number(point.measured_ms, 3)] : []),
  ]);
  const peaks = formats.map((name) => [
    name,
    large(gpu.peaks[name], "FLOP/s"),
    number(gpu.peaks[name] / gpu.bandwidth, 3),
  ]);
  return el(
    "figure",
    { class: "chart", id: `chart-${id}` },
    plot,
    key,
    readout,
    points.length
      ? asTable(label, () => ({ columns, rows }))
      : asTable(label, () => ({ columns: ["format", "peak", "ridge, FLOP/byte"], rows: peaks })),
  );
}

function boundColor(bound) {
  return { memory: "var(--over)", arithmetic: "var(--normal)" }[bound] || "var(--faint)";
}

// The memory hierarchy of a GPU, from small and fast to large and slow. A link is drawn between the levels it connects.
function hierarchy(gpu) {
  const levels = [
    [
      "Registers",
      gpu.register_bytes,
      `256 KiB in each of ${gpu.sms} SMs`,
      "128 bytes per clock in each SM (32 banks of 4)",
    ],
    ["Shared memory", gpu.shared_bytes, `${cacheBytes(gpu.shared_bytes / gpu.sms)} in each SM`, "bandwidth not published"],
    ["L2 cache", gpu.l2_bytes, "one for all SMs", large(gpu.bandwidth, "B/s")],
    [
      "Memory",
      gpu.memory_bytes,
      `read once in ${number((gpu.memory_bytes / gpu.bandwidth) * 1e3, 3)} ms`,
      gpu.nvlink ? `${large(gpu.nvlink, "B/s")} NVLink, both directions combined` : "no NVLink: PCIe",
    ],
  ];
  const [least, most] = [Math.log2(2 ** 20), Math.log2(gpu.memory_bytes)];
  const nodes = levels.map(([name, size, about, link], index) => {
    const wide = 3 + 40 * clamp((Math.log2(size) - least) / (most - least), 0, 1);
    const room = el("span", { class: "room", style: { width: `${wide}%`, background: color([2, 0, 5, 6][index]) } });
    return [
      el(
        "div",
        { class: "level" },
        el("b", {}, name),
        el("div", { class: "track" }, room, el("span", {}, el("span", { class: "size" }, index < 3 ? cacheBytes(size) : bytes(size)), ` · ${about}`)),
      ),
      el("p", { class: "link" }, link),
    ];
  });
  const others = el(
    "div",
    { class: "level" },
    el("b", {}, "Other GPUs"),
    el("span", {}, "each with its own memory"),
  );
  return el("div", { class: "levels", id: "chart-hierarchy", "data-chart": "hierarchy" }, nodes, others);
}
