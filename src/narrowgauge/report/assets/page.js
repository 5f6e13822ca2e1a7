// The page: its sections in order, and for a live one the news from its server.

function build(data) {
  const sections = [
    ["Findings", foundSection(data)],
    ["Runs", data.runs.length ? runsSection(data) : null],
    ["Curves", data.runs.some((run) => run.curves.loss) ? curvesSection(data) : null],
    ["Scale", scaleSection(data)],
    ["Underflow", heatSection(data)],
    ["Exponents", exponentsSection(data)],
    ["Layers", layersSection(data)],
    ["Validation", validationSection(data)],
    ["Benchmarks", benchSection(data)],
    ["Memory", memorySection(data)],
    ["Roofline", rooflineSection(data)],
    ["Formats", explorerSection(data)],
    ["More", absentSection(data)],
  ].filter(([, section]) => section);
  document.getElementById("main").replaceChildren(...sections.map(([, section]) => section));
  document
    .getElementById("contents")
    .replaceChildren(...sections.map(([name, section]) => el("a", { href: `#${section.id}` }, name)));
  document.getElementById("what").textContent = data.title;
  document.getElementById("foot").textContent =
    `Made ${data.made} by narrowgauge report. This page asks the network for nothing.`;
  document.title = `${data.title} - narrowgauge`;
  forgetDetached();
  markSection(sections.map(([, section]) => section));
}

// The part of the page that is being read is marked in the contents.
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

async function follow(version) {
  const note = document.getElementById("live");
  let have = version;
  note.textContent = "live";
  for (;;) {
    await new Promise((resolve) => {
      setTimeout(resolve, EVERY_MS);
    });
    try {
      const answer = await fetch(`data.json?have=${have}`, { cache: "no-store" });
      const news = await answer.json();
      note.textContent = "live";
      note.dataset.state = "on";
      if (news.data) {
        have = news.version;
        update(news.data);
      }
    } catch (error) {
      note.textContent = "the server has ended; this is the last that came";
      note.dataset.state = "lost";
    }
  }
}

// New data in place of the old, with the reader's choices, place and focus as they were.
function update(data) {
  const [top, focus] = [scrollY, document.activeElement && document.activeElement.id];
  const open = [...document.querySelectorAll("details[open] > summary")].map(
    (one) => one.closest("section").id + one.textContent,
  );
  build(data);
  for (const one of document.querySelectorAll("details > summary")) {
    if (open.includes(one.closest("section").id + one.textContent)) one.parentElement.open = true;
  }
  scrollTo({ top, behavior: "instant" });
  if (focus && document.getElementById(focus)) document.getElementById(focus).focus({ preventScroll: true });
}

const first = JSON.parse(document.getElementById("data").textContent);
setUpTheme();
build(first);
window.narrowgauge = { data: first, store, shares, parseNumber, shareOf, unpack };
if (document.body.dataset.live === "true") follow(first.version);
