// The headline and the findings at the top of the page.

// Other locations of the same finding.
function otherLocations(places) {
  if (!places.length) return null;
  const line = (place) => el("li", {}, el("code", {}, place.where), ` ${place.detail}`);
  const title = places.length === 1 ? "Also in one other location" : `Also in ${count(places.length)} other locations`;
  return el(
    "details",
    { class: "as-table" },
    el("summary", {}, title),
    el("ul", { class: "places" }, places.map(line)),
  );
}

// Whether FP16 and FP8 would work, as predicted from the runs, and what was measured for block formats, about which only
// a validation has a verdict. Equal predictions of several runs are merged.
function predictionItems(runs) {
  const merged = new Map();
  for (const run of runs) {
    for (const one of run.predictions) {
      const text = describePrediction(one);
      const known = merged.get(text) || { one, names: [] };
      known.names.push(run.name);
      merged.set(text, known);
    }
  }
  return [...merged].map(([text, { one, names }]) =>
    el(
      "li",
      { class: "finding" },
      el("span", { class: "badge", "data-severity": one.survives && !one.unused ? "good" : "warning" }, "predicted"),
      el(
        "div",
        {},
        el("p", {}, text),
        one.recipe ? el("p", { class: "fix" }, adviseRecipe(one)) : null,
        el("p", { class: "where" }, `based on ${names.join(", ")}`),
      ),
    ),
  );
}

const adviseRecipe = (one) =>
  one.measured ? `narrowgauge validate TASK --candidates "${one.recipe}"` : `--recipe ${one.recipe}`;

function describePrediction(one) {
  if (one.measured) return `${one.format.toUpperCase()} (emulated): ${one.measured}`;
  if (one.unused) return `Nothing of the model would run in ${one.format.toUpperCase()}: ${one.unused}`;
  const scale =
    one.loss_scale && one.survives ? ` with a loss scale up to ${power(Math.round(Math.log2(one.loss_scale)))}` : "";
  const breaks = one.breaks
    .slice(0, 5)
    .map((each) => `${each.module} (${each.kind}): ${each.detail}`)
    .join("; ");
  const more = one.breaks.length - 5 + one.more;
  const rest = more > 0 ? ` and ${count(more)} more` : "";
  const outcome = one.survives ? "would work" : "would fail";
  return `${one.format.toUpperCase()} ${outcome}${scale}${breaks ? `. ${breaks}${rest}` : ""}`;
}

function findingsSection(data) {
  const summary = data.summary;
  const badge = (severity) => el("span", { class: "badge", "data-severity": severity }, severity);
  const items = summary.findings.map((one) =>
    el(
      "li",
      { class: "finding" },
      badge(one.severity),
      el(
        "div",
        {},
        el("p", {}, one.detail),
        one.consequence ? el("p", { class: "consequence" }, one.consequence) : null,
        one.fix ? el("p", { class: "fix" }, one.fix) : null,
        el(
          "p",
          { class: "where" },
          [one.source, one.step === null ? "" : `step ${count(one.step)}`, one.where, one.rule]
            .filter(Boolean)
            .join(" · "),
        ),
        otherLocations(one.also),
      ),
    ),
  );
  const predictions = predictionItems(data.runs);
  const more = summary.more ? el("p", { class: "note" }, `and ${count(summary.more)} more`) : null;
  return el(
    "section",
    { class: "panel found", id: "found", "data-state": summary.state, "aria-label": "Findings" },
    el("h1", {}, summary.headline),
    items.length + predictions.length ? el("ul", { class: "findings" }, items, predictions) : null,
    more,
  );
}
