// Builds the page from its sections; a live page also polls its server for updates.

function buildPage(data) {
  const sections = [
    ["Findings", findingsSection(data)],
    ["Runs", data.runs.length ? runsSection(data) : null],
    ["Curves", data.runs.some((run) => run.curves.loss) ? curvesSection(data) : null],
    ["Scale", scaleSection(data)],
    ["Underflow", heatSection(data)],
    ["Exponents", exponentsSection(data)],
    ["Experts", expertsSection(data)],
    ["Layers", layersSection(data)],
    ["Validation", validationSection(data)],
    ["Benchmarks", benchSection(data)],
    ["Memory", memorySection(data)],
    ["Roofline", rooflineSection(data)],
    ["Formats", explorerSection(data)],
    ["More", missingSection(data)],
  ].filter(([, section]) => section);
  document.getElementById("main").replaceChildren(...sections.map(([, section]) => section));
  document
    .getElementById("contents")
    .replaceChildren(...sections.map(([name, section]) => el("a", { href: `#${section.id}` }, name)));
  document.getElementById("what").textContent = data.title;
  document.getElementById("foot").textContent =
    `Created ${data.made} by narrowgauge report. This page makes no network requests.`;
  document.title = `${data.title} - narrowgauge`;
  forgetDetached();
  markSection(sections.map(([, section]) => section));
}

// Highlights the visible section in the navigation.
let marker = null;
function markSection(sections) {
  if (marker) marker.disconnect();
  marker = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        const link = document.querySelector(`#contents a[href="#${entry.target.id}"]`);
        if (link) link.setAttribute("aria-current", String(entry.isIntersecting));
      }
    },
    { rootMargin: "-35% 0px -60% 0px" },
  );
  sections.forEach((section) => marker.observe(section));
}

const EVERY_MS = 2000;

async function pollUpdates(version) {
  const note = document.getElementById("live");
  let have = version;
  note.textContent = "live";
  for (;;) {
    await new Promise((resolve) => {
      setTimeout(resolve, EVERY_MS);
    });
    try {
      const answer = await fetch(`data.json?have=${have}`, { cache: "no-store" });
      const update = await answer.json();
      note.textContent = "live";
      note.dataset.state = "on";
      if (update.data) {
        have = update.version;
        replaceData(update.data);
      }
    } catch (error) {
      note.textContent = "server stopped; showing the last update";
      note.dataset.state = "lost";
    }
  }
}

// Replaces the data and keeps the reader's selections, scroll position and focus.
function replaceData(data) {
  const [top, focus] = [scrollY, document.activeElement && document.activeElement.id];
  const open = [...document.querySelectorAll("details[open] > summary")].map(
    (one) => one.closest("section").id + one.textContent,
  );
  buildPage(data);
  for (const one of document.querySelectorAll("details > summary")) {
    if (open.includes(one.closest("section").id + one.textContent)) one.parentElement.open = true;
  }
  scrollTo({ top, behavior: "instant" });
  if (focus && document.getElementById(focus)) document.getElementById(focus).focus({ preventScroll: true });
}

const first = JSON.parse(document.getElementById("data").textContent);
setUpTheme();
buildPage(first);
window.narrowgauge = { data: first, store, shares, parseNumber, shareOf, unpack, bytes };
if (document.body.dataset.live === "true") pollUpdates(first.version);
