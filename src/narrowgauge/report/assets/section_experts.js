// The section about mixtures of experts: how many tokens each expert of a layer got, over the run.

const EQUAL_OCTAVES = 4;

// A byte as a multiple of an equal share: 1 to 254 are 1/16 to 16 on a logarithmic scale, and 0 is no token.
const multipleOf = (code) => (code === 0 ? 0 : 2 ** (((code - 1) / 253 - 0.5) * 2 * EQUAL_OCTAVES));
const multipleText = (code) => (code === 0 ? "no token" : `${multipleOf(code).toPrecision(2)} times an equal share`);

function expertsSection(data) {
  const runs = data.runs.filter((run) => run.experts);
  if (!runs.length) return null;
  const host = el("div");
  const controls = el("div", { class: "controls" });
  const draw = () => {
    const run = runs.find((one) => one.name === choice("experts-run", runs[0].name)) || runs[0];
    const { layers, steps } = run.experts;
    const layerBox = selectBox(
      "experts-layer",
      layers.map((layer) => ({ value: layer.module, label: layer.module })),
      draw,
    );
    const layer = layers.find((one) => one.module === choice("experts-layer")) || layers[0];
    controls.replaceChildren(...[runBox("experts-run", runs, draw), field("Layer", layerBox)].filter(Boolean));
    host.replaceChildren(...drawExperts(layer, steps));
    forgetDetached();
  };
  draw();
  return panel(
    "experts",
    "Tokens per expert",
    "How many tokens the router of a layer sends to each expert, relative to an equal share, over the run.",
    controls,
    host,
  );
}

function drawExperts(layer, steps) {
  const names = Array.from({ length: layer.experts }, (_, number) => `expert ${number}`);
  const without = layer.none ? ` ${count(layer.none)} got no token.` : "";
  const words =
    `In the last sample, the ${count(layer.experts)} experts are used as if there were ` +
    `${layer.effective.toPrecision(3)} with equal shares (${count(layer.chosen)} per token). ` +
    `Expert ${layer.most} gets the most: ${percent(layer.most_share)} of all choices.${without}`;
  const map = heatMap("experts", {
    modules: names,
    cells: unpack(layer.cells, layer.experts * steps.length),
    steps,
    tint: "--under",
    label: `Tokens of the ${layer.experts} experts of ${layer.module}, ${steps.length} samples. ${words}`,
    name: "",
    merged: "sum of",
    text: multipleText,
    key: ["1/16", "16", "times an equal share, logarithmic; lightest: no token, blank: not sampled"],
    hint: "Point at a cell to read it.",
    pick: () => {},
  });
  return [el("p", { class: "note" }, words), map];
}
