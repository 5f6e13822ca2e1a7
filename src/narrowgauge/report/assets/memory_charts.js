// Memory by component: bars for each recipe, and an area chart over a step.

const COMPONENTS = ["weights", "master", "moments", "gradients", "activations", "workspace", "total"];
const componentColor = (part) => color(COMPONENTS.indexOf(part) % 8);

function memoryLegend(parts) {
  return el(
    "ul",
    { class: "legend" },
    parts.map((part) =>
      el("li", { class: "still" }, el("span", { class: "swatch", style: { background: componentColor(part) } }), part),
    ),
  );
}

function usedComponents(list) {
  return COMPONENTS.filter((part) => list.some((parts) => parts[part]));
}

// recipes: {name: {parts, total, measured}}
function memoryBars(id, label, recipes) {
  const names = Object.keys(recipes);
  const plot = el("div", { class: "plot", role: "img", "aria-label": label, "data-chart": id });
  const parts = usedComponents(names.map((name) => recipes[name].parts));
  drawWithin(plot, (width) => {
    const left = Math.min(130, width * 0.3);
    const most = Math.max(...names.map((name) => Math.max(recipes[name].total, recipes[name].measured || 0)));
    const x = linearScale(0, most, left, width - 78);
    const height = names.length * BAR_HEIGHT + 8;
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
    names.forEach((name, index) => {
      const y = index * BAR_HEIGHT + 4;
      let sum = 0;
      drawing.append(
        svg("text", { class: "strong", x: left - 8, y: y + 16, "text-anchor": "end" }, shorten(name, left)),
      );
      for (const part of parts) {
        const size = recipes[name].parts[part] || 0;
        if (size)
          drawing.append(
            svg(
              "rect",
              {
                x: x(sum),
                width: Math.max(x(sum + size) - x(sum), 0.5),
                y,
                height: BAR_HEIGHT - 9,
                fill: componentColor(part),
                "data-part": part,
              },
              svg("title", {}, `${part} ${bytes(size)}`),
            ),
          );
        sum += size;
      }
      const { total, measured } = recipes[name];
      if (measured)
        drawing.append(
          svg(
            "line",
            { class: "measured", x1: x(measured), x2: x(measured), y1: y - 2, y2: y + BAR_HEIGHT - 7 },
            svg("title", {}, `measured ${bytes(measured)}`),
          ),
        );
      drawing.append(svg("text", { x: x(Math.max(total, measured || 0)) + 7, y: y + 16 }, bytes(total)));
    });
    plot.replaceChildren(drawing);
  });
  const rows = names.map((name) => [
    name,
    ...parts.map((part) => bytes(recipes[name].parts[part])),
    bytes(recipes[name].total),
    bytes(recipes[name].measured),
  ]);
  return el(
    "figure",
    { class: "chart", id: `chart-${id}` },
    plot,
    memoryLegend(parts),
    asTable(label, () => ({ columns: ["recipe", ...parts, "total", "measured"], rows })),
  );
}

// moments: [{label, parts, at}]; at: the position within the step, from 0 to 1, if known
function memoryOverStep(id, label, moments) {
  const plot = el("div", { class: "plot", role: "img", "aria-label": label, "data-chart": id });
  const parts = usedComponents(moments.map((moment) => moment.parts));
  const sums = moments.map((moment) => parts.reduce((sum, part) => sum + (moment.parts[part] || 0), 0));
  drawWithin(plot, (width) => {
    const box = { left: 66, right: width - 10, top: 22, bottom: 224 };
    const most = Math.max(...sums);
    const scale = linearScale(0, 1, box.left, box.right);
    const x = (i) => scale(moments[i].at ?? i / Math.max(moments.length - 1, 1));
    const y = linearScale(0, most * 1.12, box.bottom, box.top);
    const drawing = svg("svg", { viewBox: `0 0 ${width} 262`, height: 262, "aria-hidden": "true" });
    const few = Math.max(1, Math.ceil((moments.length * 84) / (box.right - box.left)));
    scale.ticks = () => [];
    y.ticks = (wanted) => byteTicks(most * 1.12, wanted);
    drawing.append(...axes(box, scale, y, { xText: () => "", yText: bytes, yLabel: "memory" }));
    const floor = moments.map(() => 0);
    for (const part of parts) {
      const low = [...floor];
      moments.forEach((moment, i) => {
        floor[i] += moment.parts[part] || 0;
      });
      const top = floor.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`).join("L");
      const bottom = low
        .map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`)
        .reverse()
        .join("L");
      drawing.append(
        svg(
          "path",
          { d: `M${top}L${bottom}Z`, fill: componentColor(part), opacity: 0.85, "data-part": part },
          svg("title", {}, part),
        ),
      );
    }
    const phases = moments.map((moment) => moment.label.split(", ")[0]);
    const byPhase = moments.some((moment) => moment.label.includes(", "));
    moments.forEach((moment, i) => {
      if (byPhase ? i && phases[i] === phases[i - 1] : i % few && i !== moments.length - 1) return;
      const anchor = i === 0 ? "start" : i === moments.length - 1 ? "end" : byPhase ? "start" : "middle";
      const text = byPhase ? phases[i] : moment.label;
      drawing.append(svg("text", { x: x(i), y: box.bottom + 18, "text-anchor": anchor }, text));
    });
    const peak = sums.indexOf(most);
    const side = x(peak) < (box.left + box.right) / 2 ? "start" : "end";
    const words = `${bytes(most)}, ${moments[peak].note || moments[peak].label}`;
    drawing.append(svg("text", { class: "strong", x: x(peak), y: y(most) - 6, "text-anchor": side }, words));
    plot.replaceChildren(drawing);
  });
  const rows = moments.map((moment, i) => [
    moment.label || moment.note,
    ...parts.map((part) => bytes(moment.parts[part] || 0)),
    bytes(sums[i]),
  ]);
  return el(
    "figure",
    { class: "chart", id: `chart-${id}` },
    plot,
    memoryLegend(parts),
    asTable(label, () => ({ columns: ["moment", ...parts, "sum"], rows })),
  );
}

// Without a timeline: the memory between steps and the components at the peak.
function estimateMoments(recipe) {
  const persistent = {};
  for (const part of ["weights", "master", "moments"]) if (recipe.parts[part]) persistent[part] = recipe.parts[part];
  const sum = Object.values(persistent).reduce((a, b) => a + b, 0);
  if (recipe.between > sum) persistent.workspace = recipe.between - sum;
  return [
    { label: "between steps", parts: persistent, at: 0 },
    {
      label: "",
      note: `at the peak${recipe.peak_in ? `: ${recipe.peak_in}` : ""}`,
      parts: recipe.parts,
      at: recipe.peak_at ?? 0.5,
    },
    { label: "between steps", parts: persistent, at: 1 },
  ];
}
