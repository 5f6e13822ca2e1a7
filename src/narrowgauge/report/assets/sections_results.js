// Sections about saved results: validations, benchmarks, memory and the roofline; and the format explorer.

function validationSection(data) {
  if (!data.validations.length) return null;
  const parts = data.validations.map((one, index) => {
    const rows = Object.entries(one.candidates).map(([name, c]) => ({
      name,
      gap: c.gap,
      low: c.interval ? c.interval[0] : null,
      high: c.interval ? c.interval[1] : null,
      verdict: c.verdict,
    }));
    const title = `${one.task.split("/").pop() || one.name}, ${count(one.steps)} steps, reference ${one.reference}`;
    const verdicts = rows.map((row) => `${row.name} ${row.verdict}`).join(", ");
    const label = `Gap of the final loss relative to ${one.reference}: ${verdicts}`;
    const columns = [
      { key: "name", title: "candidate" },
      { key: "verdict", title: "verdict" },
      { key: "gap", title: "gap", text: (v) => signed(v) },
      { key: "interval", title: "interval" },
      { key: "seeds", title: "pairs" },
      { key: "detectable", title: "smallest detectable gap", text: (v) => percent(v) },
      { key: "curve_gap_largest", title: "largest gap during training", text: (v) => signed(v) },
      { key: "grad_norm_ratio", title: "gradient norm ratio", text: (v) => number(v, 4) },
      { key: "skipped", title: "skipped" },
      { key: "diverged", title: "diverged" },
    ];
    const speeds = Object.values(one.candidates);
    columns.push(...equalLossColumns(speeds, one.reference));
    if (speeds.some((c) => c.emulated)) columns.splice(2, 0, { key: "emulated", title: "emulated format" });
    const table = Object.entries(one.candidates).map(([name, c]) => ({
      ...c,
      name,
      interval: c.interval ? `${signed(c.interval[0])} to ${signed(c.interval[1])}` : "",
    }));
    const margin = one.margin || 0.005;
    return el(
      "div",
      { class: "run" },
      el("h3", {}, title),
      gapChart(`gaps${index || ""}`, label, rows, margin, one.noise_band),
      seedChart(one, index),
      dataTable(`verdicts${index || ""}`, columns, table),
    );
  });
  return panel(
    "validation",
    "Validation",
    "The gap of the final loss between runs with the same seeds, data and initial weights. A verdict needs the whole " +
      "interval inside the margin, or the whole interval outside it.",
    parts,
  );
}

// The final loss of every seed, for the reference and each candidate.
function seedChart(one, index) {
  if (!one.losses || one.losses.length < 2) return null;
  const all = [
    [one.reference, one.losses],
    ...Object.entries(one.candidates).map(([name, c]) => [name, c.losses || []]),
  ];
  const series = all.map(([name, losses], i) => ({
    name,
    x: losses.map((_, seed) => seed),
    y: losses,
    points: true,
    color: color(i),
  }));
  return lineChart(`seeds${index || ""}`, {
    label: "Final loss of every seed",
    series,
    xName: "seed",
    whole: true,
    endName: `seed ${one.losses.length - 1}`,
    dodge: true,
    height: 200,
    yText: (v) => number(v, 5),
    yLabel: "final loss",
  });
}

// How much faster a recipe reaches the reference's final loss, for tables in which any row has it.
function equalLossColumns(rows, reference) {
  if (!rows.some((row) => row.equal_loss !== null)) return [];
  const interval = (v) => (v ? `${number(v[0], 3)}× to ${number(v[1], 3)}×` : "");
  return [
    { key: "equal_loss", title: `speed to the loss of ${reference}`, text: (v) => (v === null ? "" : `${number(v, 3)}×`) },
    { key: "equal_loss_interval", title: "its interval", text: interval },
  ];
}

function benchSection(data) {
  if (!data.benches.length) return null;
  const parts = data.benches.map((one, index) => {
    const rows = one.rows.map((row) => ({
      name: row.name,
      value: row.tokens_per_s,
      text: `${large(row.tokens_per_s)}/s`,
      low: row.step_ms_high && row.step_ms ? (row.tokens_per_s * row.step_ms) / row.step_ms_high : null,
      high: row.step_ms_low && row.step_ms ? (row.tokens_per_s * row.step_ms) / row.step_ms_low : null,
    }));
    const columns = [
      { key: "name", title: "name" },
      { key: "tokens_per_s", title: `${one.unit}s per second`, text: count },
      { key: "step_ms", title: "step, ms", text: (v) => number(v) },
      { key: "peak_bytes", title: "peak memory", text: bytes },
      { key: "mfu", title: "MFU", text: (v) => percent(v) },
      { key: "ratio", title: "ratio", text: (v) => `${number(v, 3)}×` },
      ...equalLossColumns(one.rows, one.reference),
    ].filter((column) => one.rows.some((row) => row[column.key] !== null));
    const title = [one.task || one.name, one.device].filter(Boolean).join(" on ");
    return el(
      "div",
      { class: "run" },
      el("h3", {}, title),
      barChart(`bench${index || ""}`, `Throughput of ${rows.length} recipes and baselines`, rows),
      dataTable(`bench ${index + 1}`, columns, one.rows),
      one.note ? el("p", { class: "note" }, one.note) : null,
    );
  });
  return panel("bench", "Benchmarks", "Items per second. The whisker spans the slowest and the fastest round.", parts);
}

// The driver, the CUDA context and error correction take a few percent of a GPU's memory.
const MEMORY_HEADROOM = 1.05;

function memorySection(data) {
  if (!data.memories.length) return null;
  const parts = data.memories.map((one, index) => {
    const names = Object.keys(one.recipes);
    const measured = { ...one.recipes };
    for (const bench of data.benches.filter((each) => each.task && each.task === one.task)) {
      for (const row of bench.rows)
        if (measured[row.name] && row.peak_bytes && !measured[row.name].measured)
          measured[row.name] = { ...measured[row.name], measured: row.peak_bytes };
    }
    const over = tabs(
      `memory${index || ""}`,
      "Recipe",
      names.map((name) => ({ key: name, label: name })),
      (name) => {
        const given = one.recipes[name].timeline.length
          ? one.recipes[name].timeline
          : names.length === 1
            ? one.timeline
            : [];
        const moments = given.length ? given : estimateMoments(one.recipes[name]);
        const note = given.length
          ? null
          : el(
              "p",
              { class: "note" },
              "Memory between steps and at the peak, joined by straight lines because the file has no timeline.",
            );
        return [memoryOverStep(`memory-step${index || ""}`, `Memory of ${name} over a step`, moments), note].filter(
          Boolean,
        );
      },
    );
    const fits = names
      .map((name) => {
        const gpu = data.gpus
          .filter(
            (each) => name.startsWith(formatOn(each, name)) && each.memory_bytes >= one.recipes[name].total * MEMORY_HEADROOM,
          )
          .sort((a, b) => a.memory_bytes - b.memory_bytes)[0];
        return `${name}: ${gpu ? gpu.name : "none of the listed GPUs"}`;
      })
      .join("; ");
    const lines = Object.values(measured).some((each) => each.measured)
      ? " The line across a bar marks the measured peak."
      : "";
    return el(
      "div",
      { class: "run" },
      el("h3", {}, one.task || one.name),
      el(
        "div",
        { class: "split" },
        memoryBars(`memory${index || ""}`, `Memory by component of ${names.length} recipes`, measured),
        el("div", {}, over),
      ),
      el(
        "p",
        { class: "note" },
        `The smallest GPU with enough memory and native support for the format, by datasheet: ${fits}.${lines}`,
      ),
    );
  });
  return panel("memory", "Memory", "Memory of a training step by component and recipe, and over the step.", parts);
}

function rooflineSection(data) {
  const keyed = (name) =>
    name
      .toLowerCase()
      .replace(/[^a-z0-9]/g, "")
      .replace(/^nvidia/, "");
  const find = (name) => data.gpus.find((gpu) => [gpu.name, ...gpu.aliases].some((one) => keyed(one) === keyed(name)));
  const saved = data.rooflines.map((one) => ({ ...one, machine: find(one.gpu) }));
  const first =
    (saved.find((one) => one.machine) || {}).machine ||
    data.benches.map((one) => find(one.device)).find(Boolean) ||
    find("H200") ||
    data.gpus[0];
  if (!chosen.has("tab-gpu")) choose("tab-gpu", first.name);
  const body = tabs(
    "gpu",
    "GPU",
    data.gpus.map((gpu) => ({ key: gpu.name, label: gpu.name })),
    (name) => {
      const gpu = data.gpus.find((one) => one.name === name);
      const own = saved.find((one) => one.machine === gpu);
      const source = own || saved[0];
      const recipes = source ? [...new Set(source.layers.map((layer) => layer.recipe))].filter(Boolean) : [];
      const options = recipes.length ? recipes : ROOFS.filter((format) => gpu.peaks[format]);
      const host = el("div");
      const draw = () => {
        const wanted = choice("roof-recipe");
        const layers = source ? source.layers.filter((layer) => !recipes.length || layer.recipe === wanted) : [];
        // Times predicted for another GPU do not apply: its layers are drawn at the roof.
        const known = own ? layers : layers.map((layer) => ({ ...layer, ms: null }));
        host.replaceChildren(rooflineChart("roofline", gpu, known, formatOn(gpu, wanted)));
        forgetDetached();
      };
      const box = selectBox(
        "roof-recipe",
        options.map((option) => ({ value: option, label: option })),
        draw,
        "bf16",
      );
      draw();
      const words = source
        ? `Layers of ${source.task || source.name}${own ? "" : `, counted for ${source.gpu}`}.`
        : "No layers: add the JSON output of narrowgauge roofline.";
      return [
        el(
          "div",
          { class: "split" },
          el(
            "div",
            {},
            el("h3", {}, "Roofline"),
            el("div", { class: "controls" }, field("Recipe", box)),
            host,
            el("p", { class: "note" }, words),
            recipeTable(saved, find, gpu),
          ),
          el("div", {}, el("h3", {}, "Memory hierarchy"), hierarchy(gpu)),
        ),
        el(
          "p",
          { class: "note" },
          `${gpu.architecture}. Peaks are dense, with FP32 accumulation. ` +
            `${gpu.source}${gpu.note ? `; ${gpu.note}` : ""}.`,
        ),
      ];
    },
  );
  return panel(
    "roofline",
    "Roofline and memory hierarchy",
    "Left of a ridge point (circles, in FLOP per byte) a layer is memory-bound, right of it compute-bound. The bars of " +
      "the hierarchy are logarithmic.",
    body,
  );
}

// The predicted step of each recipe on a GPU.
function recipeTable(saved, find, gpu) {
  const found = saved.flatMap((one) => Object.entries(one.recipes)).find(([name]) => find(name) === gpu);
  if (!found || !Object.keys(found[1]).length) return null;
  const rows = Object.entries(found[1]).map(([recipe, row]) => ({ ...row, recipe }));
  const text = (value) => (typeof value !== "number" ? value : value >= 1000 ? count(value) : number(value));
  const columns = [
    { key: "recipe", title: "recipe" },
    { key: "step_ms", title: "step, ms", text },
    { key: "measured_ms", title: "measured, ms", text },
    { key: "tokens_per_s", title: "per second", text },
    { key: "mfu", title: "MFU", text: (v) => percent(v) },
    { key: "bound", title: "bound by" },
    { key: "hours", title: "hours", text },
    { key: "cost", title: "cost", text },
  ].filter((column) => rows.some((row) => row[column.key] !== undefined && row[column.key] !== null));
  return dataTable("recipes", columns, rows);
}

function explorerSection(data) {
  return panel(
    "formats",
    "Format explorer",
    "Enter a number to see how each format stores it: sign, exponent and mantissa bits.",
    explorer(data.formats),
  );
}

// Results that this report does not include, with the commands that produce them.
function missingSection(data) {
  const hints = [
    [!data.runs.length, "runs", "narrowgauge train TASK"],
    [data.runs.length && !data.runs.some((run) => run.heat), "tensors", "narrowgauge train TASK --watch 100"],
    [!data.validations.length, "verdicts and SQNR by layer", "narrowgauge validate TASK --save validation.json"],
    [!data.benches.length, "measured throughput", "narrowgauge bench TASK --save bench.json"],
    [!data.memories.length, "memory by component", "narrowgauge memory TASK --json > memory.json"],
    [!data.rooflines.length, "layers on the roofline", "narrowgauge roofline TASK --json > roofline.json"],
  ].filter(([absent]) => absent);
  if (!hints.length) return null;
  return panel(
    "absent",
    "Not in this report",
    "Create these files and pass them to narrowgauge report to include them.",
    el(
      "ul",
      { class: "hints" },
      hints.map(([, what, command]) => el("li", {}, el("span", {}, what), el("code", {}, command))),
    ),
  );
}
