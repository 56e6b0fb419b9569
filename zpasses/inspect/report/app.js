// The page's frame: graphs and passes on the left, views on top, the selected node on the right.

const DRAW = {
  overview: drawOverview,
  diff: drawDiff,
  memory: drawMemory,
  timeline: drawTimeline,
  collectives: drawCollectives,
  listing: drawListing,
  source: drawSource,
  compare: drawCompare,
};
const parts = {
  nav: el("nav", { class: "nav", "aria-label": "Graphs and passes" }),
  tabs: el("div", { class: "tabs", role: "tablist", "aria-label": "Views" }),
  main: el("main", {
    id: "main",
    tabindex: -1,
    role: "tabpanel",
    "aria-labelledby": "tab-overview",
  }),
  detail: el("aside", { class: "detail", "aria-label": "Node", hidden: true }),
};

const top_ = el("header", { class: "top" });

// A compile, and the rank and the dump that it is of if the page has several of them.
function compileName(compile) {
  const several = (key) => new Set(compiles.map((each) => each[key])).size > 1;
  return [
    several("dump") && compile.dump,
    several("rank") && `rank ${compile.rank}`,
    `compile ${compile.name}`,
  ]
    .filter(Boolean)
    .join(", ");
}

function drawHeader() {
  const menu = () => document.body.classList.toggle("with-nav");
  const toCompile = (at) => go({ compile: +at, graph: "", node: null });
  const options = compiles.map((compile, at) =>
    option(at, at === state.compile, compileName(compile) + (compile.error ? " (failed)" : "")),
  );
  return clear(
    top_,
    button("☰", menu, {
      class: "quiet",
      id: "menu",
      "aria-label": "Graphs and passes",
      title: "Show or hide the list of graphs and passes",
    }),
    el("h1", {}, "zpasses"),
    compiles.length > 1
      ? choice("Compile", options, toCompile, { id: "compile" })
      : compiles.length === 1 && el("span", {}, `compile ${compiles[0].name}`),
    el("span", { class: "muted", id: "about" }, aboutHere()),
    stretchSpace(),
    el("span", { class: "muted path", id: "path", title: pathHere() }, shortHere()),
    button("◐", nextTheme, {
      class: "quiet",
      id: "theme",
      "aria-label": "Color theme",
      title: "Switch between the system's, the dark and the light theme",
    }),
  );
}

// The theme survives a reload. A browser may forbid storage to pages from files.
function storedTheme(theme) {
  try {
    if (theme !== undefined) localStorage.setItem("zpasses-theme", theme);
    return localStorage.getItem("zpasses-theme");
  } catch {
    return null;
  }
}

// What the header says of the shown compile.
function aboutHere() {
  const compile = compiles[state.compile];
  return [
    `rank ${(compile || report).rank} of ${(compile || report.meta).world}`,
    compile && compile.target.name,
    `torch ${(compile && compile.torch) || report.meta.torch}`,
  ]
    .filter(Boolean)
    .join(" · ");
}

// The dump that the shown compile is of.
function pathHere() {
  const compile = compiles[state.compile];
  return (compile && compile.path) || report.path;
}

function shortHere() {
  return pathHere().split("/").slice(-3).join("/");
}

function nextTheme() {
  const order = ["", "dark", "light"],
    root = document.documentElement;
  root.dataset.theme = order[(order.indexOf(root.dataset.theme || "") + 1) % order.length];
  storedTheme(root.dataset.theme);
  document.querySelectorAll("canvas").forEach((each) => each.repaint());
}

function drawNav() {
  const section = (graph) =>
    el(
      "section",
      {},
      el("h2", {}, graph.name),
      el("ul", {}, graph.steps.map((step, at) => el("li", {}, navButton(graph, step, at)))),
    );
  clear(parts.nav, byInterest(current.compile.graphs).map(section));
}

function navButton(graph, step, at) {
  const here = graph.name === state.graph && at === state.step && state.tab !== "overview";
  const changed = step.after && step.same === undefined && step.diff;
  const title = "Nodes: + inserted, − removed, ~ moved or changed. Each counts once.";
  const count = step.error
    ? span("count failed", "failed")
    : changed && el("span", { class: "count", title }, countOf(step.diff));
  const show = () => {
    document.body.classList.remove("with-nav");
    const tab = state.tab === "overview" ? (step.after ? "diff" : "listing") : state.tab;
    go({ graph: graph.name, step: at, tab });
  };
  return button([span("step", step.after || "before passes"), count], show, {
    "aria-current": here ? "true" : null,
    class: step.after && !changed && !step.error ? "idle" : "",
    title: step.after
      ? `${step.after}${step.same !== undefined ? ": no change" : ""}`
      : "Before the first pass",
  });
}

// "+2 −1 ~3": nodes. A node that was moved or changed in several ways counts once in "~", as in
// `Difference.changed_nodes` of zpasses/inspect/difference.py.
function countOf(diff) {
  const ids = (kinds) =>
    new Set(kinds.flatMap((kind) => (diff[kind] || []).map(([id]) => id))).size;
  const signed = { "+": ids(["inserted"]), "−": ids(["removed"]), "~": ids(CHANGES.slice(2)) };
  const known = Object.entries(signed).filter(([, size]) => size);
  return known.map(([sign, size]) => sign + countText(size)).join(" ");
}

function drawTabs() {
  const after = current.step.after;
  clear(
    parts.tabs,
    TABS.map((tab) =>
      button(titleOf(tab), () => go({ tab }), {
        role: "tab",
        id: `tab-${tab}`,
        "aria-selected": tab === state.tab,
        "aria-controls": "main",
        tabindex: tab === state.tab ? 0 : -1,
      }),
    ),
    state.tab !== "overview" &&
      span("where", el("b", {}, state.graph), after ? ` after ${after}` : " before the first pass"),
  );
}

parts.tabs.addEventListener("keydown", (event) => {
  const steps = { ArrowRight: 1, ArrowLeft: -1 };
  if (!(event.key in steps)) return;
  go({ tab: TABS[(TABS.indexOf(state.tab) + steps[event.key] + TABS.length) % TABS.length] });
  document.getElementById(`tab-${state.tab}`).focus();
  event.preventDefault();
});

// Redraws the main part. Scroll positions and the focused field are kept.
function redraw() {
  hideTooltip();
  const focus =
    document.activeElement && parts.main.contains(document.activeElement)
      ? document.activeElement.getAttribute("aria-label")
      : null;
  const scrolled = [...parts.main.querySelectorAll(".rows")].map((each) => each.scrollTop);
  parts.main.setAttribute("aria-labelledby", `tab-${state.tab}`);
  parts.main.className = `view-${state.tab}`;
  clear(
    parts.main,
    notice && el("p", { class: "notice", role: "status" }, notice),
    state.tab !== "overview" && failedStep(current.step),
  );
  DRAW[state.tab](parts.main);
  prepareComparison();
  if (!focus) return;
  const again = parts.main.querySelector(`[aria-label="${CSS.escape(focus)}"]`);
  if (again) again.focus({ preventScroll: true });
  [...parts.main.querySelectorAll(".rows")].forEach((each, at) => {
    if (scrolled[at]) each.scrollTop = scrolled[at];
  });
}

const KEEPS_SCROLL = ["diff", "listing", "collectives", "compare"];

listeners.push((before) => {
  drawNav();
  drawTabs();
  const moved = ["compile", "graph", "step", "tab"].some((key) => before[key] !== state[key]);
  // A list in which the node was selected needs no redraw.
  const inShownList = parts.main.querySelector(".row.active");
  const ofList = parts.main.contains(document.activeElement) || parts.main.matches(":hover");
  if (
    moved ||
    !drawnOnce ||
    !(KEEPS_SCROLL.includes(state.tab) && ofList && before.node !== state.node && inShownList)
  )
    redraw();
  drawnOnce = true;
  drawDetail(parts.detail);
  document.body.classList.toggle("with-detail", !parts.detail.hidden);
  const select = document.getElementById("compile");
  if (select) select.value = state.compile;
  clear(document.getElementById("about"), aboutHere());
  const path = clear(document.getElementById("path"), shortHere());
  path.title = pathHere();
});
let drawnOnce = false;

document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape") {
    if (state.node !== null) go({ node: null });
    return;
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const field = event.key === "/" && parts.main.querySelector(".filter");
  if (field) {
    field.focus();
    event.preventDefault();
  }
  if (event.key === "[" || event.key === "]") {
    const step = state.step + (event.key === "]" ? 1 : -1);
    if (step >= 0 && step < current.data.steps.length) go({ step });
  }
});

addEventListener("popstate", fromAddress);
if (["dark", "light"].includes(storedTheme()))
  document.documentElement.dataset.theme = storedTheme();

if (!compiles.some((compile) => compile.graphs.length)) {
  put(
    document.getElementById("app"),
    drawHeader(),
    el(
      "main",
      { id: "main" },
      compiles.map((compile) => failure(compile.error)),
      remark("This dump contains no graphs."),
    ),
  );
} else {
  const first = compiles.findIndex((compile) => compile.graphs.length);
  if (!compiles[state.compile].graphs.length) state.compile = first;
  put(document.getElementById("app"), drawHeader(), Object.values(parts));
  fromAddress();
}
