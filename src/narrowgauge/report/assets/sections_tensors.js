// Sections about tensors: the heat map of underflow and overflow, the exponents of one tensor, and the layer table.

const KIND_LABELS = {
  weight: "weights",
  activation: "activations",
  gradient: "activation gradients",
  weight_gradient: "weight gradients",
  update: "updates",
};
const LOSS_LABELS = { flushed: "flushed to zero", subnormal: "subnormal", overflow: "overflowing" };
const OBSERVED = { zeros: "zero", "not finite": "inf or NaN", lost: "too small to change a BF16 weight" };

const watchedRuns = (data) => data.runs.filter((run) => run.heat);

function runBox(name, runs, onchange) {
  if (runs.length < 2) return null;
  return field(
    "Run",
    selectBox(
      name,
      runs.map((run) => ({ value: run.name, label: run.name })),
      onchange,
    ),
  );
}

// The note below the map: the scale at which the format is applied to the tensors.
function describeScale(format, kind, scaled) {
  if (!format) return "Counted in the tensors as trained.";
  if (format.startsWith("fp8"))
    return "Each tensor is scaled so that its largest value just fits the format, as in FP8 training.";
  if (format !== "fp16") return "No scaling.";
  if (!kind.includes("gradient")) return "No scaling: a loss scale only affects gradients.";
  return scaled
    ? "At the loss scale of each step. Values that FP16 flushed during training are already zero, and count as zero."
    : "This run has no loss scale: computed with the largest one that fits all gradients of the step.";
}

function heatSection(data) {
  const runs = watchedRuns(data);
  if (!runs.length) return null;
  const host = el("div");
  const controls = el("div", { class: "controls" });
  const draw = () => {
    const run = runs.find((one) => one.name === choice("heat-run", runs[0].name)) || runs[0];
    const kinds = Object.keys(run.heat.kinds);
    const kindBox = selectBox(
      "heat-kind",
      kinds.map((kind) => ({ value: kind, label: KIND_LABELS[kind] || kind })),
      draw,
      "gradient",
    );
    const kind = choice("heat-kind");
    const planes = run.heat.kinds[kind].planes;
    const formats = Object.keys(data.formats).filter((name) => `${name} flushed` in planes);
    const formatBox = formats.length
      ? selectBox(
          "heat-format",
          formats.map((name) => ({ value: name, label: data.formats[name].title })),
          draw,
          "fp16",
        )
      : null;
    const own = Object.keys(OBSERVED).filter((name) => name in planes);
    const losses = formats.length ? Object.keys(LOSS_LABELS) : [];
    const lossBox = selectBox(
      "heat-loss",
      [...losses, ...own].map((name) => ({ value: name, label: LOSS_LABELS[name] || OBSERVED[name] })),
      draw,
      "flushed",
    );
    const loss = choice("heat-loss");
    const format = loss in LOSS_LABELS ? choice("heat-format") : null;
    if (formatBox) formatBox.disabled = !format;
    const sortBox = selectBox(
      "heat-sort",
      [
        { value: "model", label: "model order" },
        { value: "worst", label: "worst first" },
      ],
      draw,
    );
    controls.replaceChildren(
      ...[
        runBox("heat-run", runs, draw),
        field("Tensors", kindBox),
        formatBox && field("Format", formatBox),
        field("Share", lossBox),
        field("Order", sortBox),
      ].filter(Boolean),
    );
    host.replaceChildren(...drawHeat(data, run, kind, format, loss));
    forgetDetached();
  };
  draw();
  return panel(
    "heat",
    "Underflow and overflow",
    "The share of each tensor's values that a format would lose, by module, over the run.",
    controls,
    host,
  );
}

function drawHeat(data, run, kind, format, loss) {
  const { modules, planes, missing } = run.heat.kinds[kind];
  const columns = run.heat.steps.length;
  const cells = unpack(planes[format ? `${format} ${loss}` : loss], modules.length * columns);
  if (missing)
    unpack(missing, cells.length).forEach((gone, i) => {
      if (gone) cells[i] = MISSING;
    });
  const worst = modules.map((_, row) =>
    cells.subarray(row * columns, (row + 1) * columns).reduce((a, b) => (b === MISSING ? a : Math.max(a, b)), 0),
  );
  const order = modules.map((_, index) => index);
  if (choice("heat-sort") === "worst") order.sort((a, b) => worst[b] - worst[a]);
  const what = LOSS_LABELS[loss] || OBSERVED[loss];
  const top = worst.indexOf(Math.max(...worst));
  const words =
    worst[top] === 0
      ? `No tensor has values that are ${what}.`
      : `Largest share: ${percent(shareOf(worst[top]))} ${what} in ${modules[top]}.`;
  const title = format ? data.formats[format].title : "the format they were trained in";
  const map = heatMap("heat", {
    modules,
    cells,
    steps: run.heat.steps,
    order,
    tint: loss === "overflow" || loss === "not finite" ? "--over" : loss === "subnormal" ? "--subnormal" : "--under",
    label: `${KIND_LABELS[kind] || kind} in ${title}, share ${what}, ${modules.length} modules, ${columns} samples. ${words}`,
    name: what,
    hint: "Click a cell, or press Enter, to see the exponents of that tensor.",
    pick: (module, steps) => showTensor(data, run, kind, module, steps, format),
  });
  return [el("p", { class: "note" }, words, " ", describeScale(format, kind, run.heat.scaled)), map];
}

// Opens the exponent histogram of a cell's tensor.
function showTensor(data, run, kind, module, steps, format) {
  const rows = run.histograms.rows;
  const row = rows.findIndex((one) => one.k === kind && one.m === module);
  if (row < 0) return;
  choose("exponents-run", run.name);
  choose("exponents-kind", kind);
  choose("exponents-module", module);
  chosen.delete("exponents-shift");
  if (format) choose("exponents-format", format);
  const near = run.histograms.steps.map((step) => Math.abs(step - steps[1]));
  choose("exponents-sample", near.indexOf(Math.min(...near)));
  const section = exponentsSection(data);
  document.getElementById("exponents").replaceWith(section);
  forgetDetached();
  section.scrollIntoView({ block: "start" });
  section.querySelector("#exponents-scale").focus({ preventScroll: true });
}

const SHIFTS = [-24, 32];

function exponentsSection(data) {
  const runs = watchedRuns(data);
  if (!runs.length) return null;
  const body = el("div");
  const draw = () => {
    body.replaceChildren(...drawExponents(data, runs, draw));
    forgetDetached();
  };
  draw();
  return panel(
    "exponents",
    "Exponents",
    "A histogram of a tensor's values over powers of two, below the range of each format. Move the scale slider to " +
      "shift the values into or out of a format's range.",
    body,
  );
}

function drawExponents(data, runs, draw) {
  const run = runs.find((one) => one.name === choice("exponents-run", runs[0].name)) || runs[0];
  const { steps, rows } = run.histograms;
  const kinds = [...new Set(rows.map((row) => row.k))];
  const kindBox = selectBox(
    "exponents-kind",
    kinds.map((kind) => ({ value: kind, label: KIND_LABELS[kind] || kind })),
    () => {
      chosen.delete("exponents-shift"); // a scale for gradients does not apply to activations
      draw();
    },
    "gradient",
  );
  const kind = choice("exponents-kind");
  const modules = rows.filter((row) => row.k === kind);
  const moduleBox = selectBox(
    "exponents-module",
    modules.map((row) => ({ value: row.m, label: row.m })),
    draw,
  );
  const row = modules.find((one) => one.m === choice("exponents-module"));
  const known = row.samples.map((sample, i) => (sample ? i : -1)).filter((i) => i >= 0);
  let index = choice("exponents-sample", known[known.length - 1]);
  if (!known.includes(index)) index = known[known.length - 1];

  const names = Object.keys(data.formats);
  const formatBox = selectBox(
    "exponents-format",
    names.map((name) => ({ value: name, label: data.formats[name].title })),
    () => update(),
    "fp16",
  );
  const chart = histogramChart(
    "exponents",
    data.formats,
    row.samples[index],
    `Exponents of ${row.m}, ${KIND_LABELS[kind] || kind}`,
  );
  const slider = el("input", {
    type: "range",
    id: "exponents-scale",
    min: SHIFTS[0],
    max: SHIFTS[1],
    step: 1,
    value: choice("exponents-shift", 0),
  });
  const scaleOut = el("output", { for: "exponents-scale" });
  const sampleSlider = el("input", {
    type: "range",
    id: "exponents-sample",
    min: 0,
    max: known.length - 1,
    step: 1,
    value: known.indexOf(index),
    disabled: known.length < 2,
  });
  const sampleOut = el("output", { for: "exponents-sample" });
  const facts = el("p", { class: "readout", "aria-live": "polite" });

  function update() {
    const place = known[Number(sampleSlider.value)];
    chart.sample = row.samples[place];
    const own = clamp(Math.round(Math.log2(chart.sample[3])), ...SHIFTS);
    if (!chosen.has("exponents-shift")) slider.value = own;
    chart.shift = Number(slider.value);
    chart.format = choice("exponents-format");
    scaleOut.textContent = `${power(chart.shift)}${chart.shift === own ? ", as trained" : ""}`;
    slider.setAttribute("aria-valuetext", `2 to the power of ${chart.shift}`);
    sampleOut.textContent = `step ${count(steps[place])}`;
    sampleSlider.setAttribute("aria-valuetext", sampleOut.textContent);
    const [, , amax, scale, n, zeros, inf, nan, dtype] = chart.sample;
    facts.replaceChildren(
      "largest value ",
      el("b", {}, number(amax / scale, 4)),
      `, ${count(n)} values in ${dtype}`,
      zeros ? `, ${percent(zeros / n)} zero` : "",
      inf + nan ? `, ${count(inf + nan)} inf or NaN` : "",
    );
    chart.redraw();
  }
  slider.addEventListener("input", () => {
    choose("exponents-shift", Number(slider.value));
    update();
  });
  sampleSlider.addEventListener("input", () => {
    choose("exponents-sample", known[Number(sampleSlider.value)]);
    update();
  });
  update();
  const controls = el(
    "div",
    { class: "controls" },
    runBox("exponents-run", runs, draw),
    field("Tensors", kindBox),
    field("Module", moduleBox),
    field("Format", formatBox),
  );
  const sliders = el(
    "div",
    { class: "controls" },
    el("label", { class: "field wide" }, el("span", {}, "Scale ", scaleOut), slider),
    el("label", { class: "field wide" }, el("span", {}, "Sampled at ", sampleOut), sampleSlider),
  );
  return [controls, sliders, chart.node, facts, chart.outcome];
}

function layersSection(data) {
  if (!data.layers.length) return null;
  const items = data.layers.map((one, index) => ({ key: String(index), label: one.task || "layers" }));
  const show = (key) => layersTable(data.layers[Number(key)]);
  return panel(
    "layers",
    "Layers",
    "Time from the roofline, SQNR in dB from the validation (signal relative to error, higher is better), underflow " +
      "from the tensor readings.",
    items.length > 1 ? tabs("layers", "Task", items, show) : show("0"),
  );
}

const UNITS = {
  "%": (v) => percent(v),
  ms: (v) => number(v, 3),
  dB: (v) => (v >= 200 ? "equal" : v <= -200 ? "not finite" : v.toFixed(1)),
  "": (v) => String(v),
};

function layersTable({ columns, rows, watched }) {
  const host = el("div");
  const search = el("input", {
    type: "search",
    id: "layers-filter",
    value: choice("layers-filter", ""),
    placeholder: "part of a name",
  });
  const described = [{ key: "module", title: "layer" }];
  if (rows.some((row) => row.summary)) described.push({ key: "summary", title: "summary", words: true });
  for (const column of columns) {
    const most = Math.max(...rows.map((row) => (typeof row[column.key] === "number" ? row[column.key] : 0)));
    const bar = column.unit === "%" ? Math.max(most, 0.001) : column.unit === "ms" ? most : null;
    const tint = column.unit === "ms" ? "var(--normal)" : "var(--under)";
    described.push({ key: column.key, title: column.title, text: UNITS[column.unit], bar, tint });
  }
  if (rows.some((row) => row.class)) described.push({ key: "class", title: "class" });
  const draw = () => {
    const wanted = search.value.toLowerCase();
    const found = rows.filter((row) => row.module.toLowerCase().includes(wanted));
    host.replaceChildren(...dataTable("layers", described, found).filter(Boolean));
  };
  search.addEventListener("input", () => {
    choose("layers-filter", search.value);
    draw();
  });
  draw();
  const from = watched ? el("p", { class: "note" }, `Underflow is the worst sample of ${watched}.`) : null;
  return [el("div", { class: "controls" }, field("Filter", search)), host, from].filter(Boolean);
}
