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
  clear(
    top_,
    button("☰", () => document.body.classList.toggle("with-nav"), {
      class: "quiet",
      id: "menu",
      "aria-label": "Graphs and passes",
      title: "Show or hide the list of graphs and passes",
    }),
    el("h1", {}, "zpasses"),
    compiles.length > 1
      ? el(
          "select",
          {
            id: "compile",
            "aria-label": "Compile",
            onchange: (event) =>
              go({ compile: +event.target.value, graph: "", node: null }),
          },
          compiles.map((compile, at) =>
            el(
              "option",
              { value: at, selected: at === state.compile },
              `${compileName(compile)}${compile.error ? " (failed)" : ""}`,
            ),
          ),
        )
      : compiles.length === 1 && el("span", {}, `compile ${compiles[0].name}`),
    el("span", { class: "muted", id: "about" }, aboutHere()),
    el("span", { class: "stretch" }),
    el("span", { class: "muted path", id: "path", title: pathHere() }, shortHere()),
    button("◐", nextTheme, {
      class: "quiet",
      id: "theme",
      "aria-label": "Color theme",
      title: "Switch between the system's, the dark and the light theme",
    }),
  );
  return top_;
}

// The theme survives a reload. A browser may forbid storage to pages from files.
function rememberTheme(theme) {
  try {
    localStorage.setItem("zpasses-theme", theme);
  } catch {
    return;
  }
}

function restoreTheme() {
  try {
    const theme = localStorage.getItem("zpasses-theme");
    if (["dark", "light"].includes(theme)) document.documentElement.dataset.theme = theme;
  } catch {
    return;
  }
}

// What the header says of the shown compile.
function aboutHere() {
  const compile = compiles[state.compile];
  return [
    `rank ${compile ? compile.rank : report.rank} of ${compile ? compile.world : report.meta.world}`,
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
  rememberTheme(root.dataset.theme);
  document.querySelectorAll("canvas").forEach((each) => each.repaint());
}

function drawNav() {
  const compile = current.compile;
  clear(
    parts.nav,
    byInterest(compile.graphs).map((graph) =>
      el(
        "section",
        {},
        el("h2", {}, graph.name),
        el(
          "ul",
          {},
          graph.steps.map((step, at) => {
            const here =
              graph.name === state.graph && at === state.step && state.tab !== "overview";
            const changed = step.after && step.same === undefined && step.diff;
            return el(
              "li",
              {},
              button(
                [
                  el("span", { class: "step" }, step.after ? step.after : "before passes"),
                  step.error
                    ? el("span", { class: "count failed" }, "failed")
                    : changed && el(
                        "span",
                        {
                          class: "count",
                          title: "Nodes: + inserted, − removed, ~ moved or changed. Each counts once.",
                        },
                        countOf(step.diff),
                      ),
                ],
                () => {
                  document.body.classList.remove("with-nav");
                  go({
                    graph: graph.name,
                    step: at,
                    tab: state.tab === "overview" ? (step.after ? "diff" : "listing") : state.tab,
                  });
                },
                {
                  "aria-current": here ? "true" : null,
                  class: step.after && !changed && !step.error ? "idle" : "",
                  title: step.after
                    ? `${step.after}${step.same !== undefined ? ": no change" : ""}`
                    : "Before the first pass",
                },
              ),
            );
          }),
        ),
      ),
    ),
  );
}

// "+2 −1 ~3": nodes. A node that was moved or changed in several ways counts once in "~", as in
// `Difference.changed_nodes` of zpasses/inspect/difference.py.
function countOf(diff) {
  const count = (kind) => (diff[kind] || []).length;
  const signed = (sign, size) => size && `${sign}${countText(size)}`;
  const other = new Set(CHANGES.slice(2).flatMap((kind) => (diff[kind] || []).map(([id]) => id))).size;
  return [
    signed("+", count("inserted")),
    signed("−", count("removed")),
    signed("~", other),
  ]
    .filter(Boolean)
    .join(" ");
}

function drawTabs() {
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
      el(
        "span",
        { class: "where" },
        el("b", {}, state.graph),
        ` ${current.step.after ? `after ${current.step.after}` : "before the first pass"}`,
      ),
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
  const again = [...parts.main.querySelectorAll("[aria-label]")].find(
    (each) => each.getAttribute("aria-label") === focus,
  );
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
  const ofList = parts.main.contains(document.activeElement) || parts.main.matches(":hover");
  if (
    moved ||
    !drawnOnce ||
    !(KEEPS_SCROLL.includes(state.tab) && ofList && before.node !== state.node && isInShownList())
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

// Whether the selected node was selected in the visible list. Such a list needs no redraw.
function isInShownList() {
  return Boolean(parts.main.querySelector(".row.active"));
}

document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape") {
    if (state.node !== null) go({ node: null });
    return;
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    const field = parts.main.querySelector(".filter");
    if (field) {
      field.focus();
      event.preventDefault();
    }
  }
  if (event.key === "[" || event.key === "]") {
    const step = state.step + (event.key === "]" ? 1 : -1);
    if (step >= 0 && step < current.data.steps.length) go({ step });
  }
});

addEventListener("popstate", fromAddress);
restoreTheme();

if (!compiles.some((compile) => compile.graphs.length)) {
  put(
    document.getElementById("app"),
    drawHeader(),
    el(
      "main",
      { id: "main" },
      compiles.map((compile) => failure(compile.error)),
      el("p", { class: "muted pad" }, "This dump contains no graphs."),
    ),
  );
} else {
  const first = compiles.findIndex((compile) => compile.graphs.length);
  if (!compiles[state.compile].graphs.length) state.compile = first;
  put(document.getElementById("app"), drawHeader(), parts.nav, parts.tabs, parts.main, parts.detail);
  fromAddress();
}
