// What was found, in words, at the top of the page.

// The other places of the same finding.
function alsoAt(places) {
  if (!places.length) return null;
  const line = (place) => el("li", {}, el("code", {}, place.where), ` ${place.detail}`);
  const title = `Also at ${places.length === 1 ? "one other place" : `${count(places.length)} other places`}`;
  return el(
    "details",
    { class: "as-table" },
    el("summary", {}, title),
    el("ul", { class: "places" }, places.map(line)),
  );
}

// How FP16 and FP8 would do, by the runs that tell it: the same of several runs is told once.
function predictionsOf(runs) {
  const told = new Map();
  for (const run of runs) {
    for (const one of run.predictions) {
      const text = describePrediction(one);
      const known = told.get(text) || { one, names: [] };
      known.names.push(run.name);
      told.set(text, known);
    }
  }
  return [...told].map(([text, { one, names }]) =>
    el(
      "li",
      { class: "finding" },
      el("span", { class: "badge", "data-severity": one.survives ? "good" : "warning" }, "predicted"),
      el(
        "div",
        {},
        el("p", {}, text),
        one.recipe ? el("p", { class: "mend" }, `--recipe ${one.recipe}`) : null,
        el("p", { class: "where" }, `from the numbers of ${names.join(", ")}`),
      ),
    ),
  );
}

function describePrediction(one) {
  const scale =
    one.loss_scale && one.survives ? ` with a loss scale up to ${power(Math.round(Math.log2(one.loss_scale)))}` : "";
  const breaks = one.breaks
    .slice(0, 5)
    .map((each) => `${each.module} (${each.kind}): ${each.detail}`)
    .join("; ");
  const more = one.breaks.length - 5 + one.more;
  const rest = more > 0 ? ` and ${count(more)} more` : "";
  const fate = one.survives ? "would do" : "would fail";
  return `${one.format.toUpperCase()} ${fate}${scale}${breaks ? `. ${breaks}${rest}` : ""}`;
}

function foundSection(data) {
  const told = data.told;
  const badge = (severity) => el("span", { class: "badge", "data-severity": severity }, severity);
  const items = told.findings.map((one) =>
    el(
      "li",
      { class: "finding" },
      badge(one.severity),
      el(
        "div",
        {},
        el("p", {}, one.detail),
        one.consequence ? el("p", { class: "leads" }, one.consequence) : null,
        one.fix ? el("p", { class: "mend" }, one.fix) : null,
        el(
          "p",
          { class: "where" },
          [one.source, one.step === null ? "" : `step ${count(one.step)}`, one.where, one.rule]
            .filter(Boolean)
            .join(" · "),
        ),
        alsoAt(one.also),
      ),
    ),
  );
  const predictions = predictionsOf(data.runs);
  const more = told.more ? el("p", { class: "note" }, `and ${count(told.more)} more`) : null;
  return el(
    "section",
    { class: "panel found", id: "found", "data-state": told.state, "aria-label": "Findings" },
    el("h1", {}, told.headline),
    items.length + predictions.length ? el("ul", { class: "findings" }, items, predictions) : null,
    more,
  );
}
