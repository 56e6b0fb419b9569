// The listing of a graph, with a filter.

function drawListing(main) {
  const graph = current.graph;
  if (!graph) return put(main, notWritten());
  let shown = [];
  const list = rowList({
    label: `Nodes of ${state.graph} ${stepName(current.step)}`,
    row: (at) =>
      shown[at].fold
        ? foldRow(shown[at], (block) => block.items)
        : listingRow(graph, shown[at]),
    pick: (at) => {
      if (!shown[at].fold) return go({ node: shown[at].id });
      toggleFold(shown[at]);
      return fill(at);
    },
  });
  const count = el("span", { class: "muted", role: "status" });
  const none = el("p", { class: "muted pad", role: "status", hidden: true });
  const fill = (active) => {
    const words = (state.view.filter || "").toLowerCase().split(/\s+/).filter(Boolean);
    shown = graph.nodes.filter((node) => words.every((word) => matches(node, word)));
    clear(
      count,
      shown.length === graph.nodes.length
        ? plural(shown.length, "node")
        : `${countText(shown.length)} of ${plural(graph.nodes.length, "node")}`,
    );
    const matching = shown.length;
    none.hidden = matching > 0;
    clear(none, graph.nodes.length ? nothingMatches("node") : "This graph has no nodes.");
    if (isFolded(graph.nodes.length)) {
      const layers = layersOf(graph);
      shown = foldRows(
        shown,
        (node) => layers.get(node.id),
        `${state.graph}/${state.step}`,
        (node) => node.id === state.node,
      );
    }
    list.fill(
      shown.length,
      active ?? shown.findIndex((node) => !node.fold && node.id === state.node),
    );
  };
  put(
    main,
    el(
      "div",
      { class: "bar" },
      filterField("Filter by name, op, parameter, module or is:collective", () => fill()),
      foldSwitch(graph.nodes.length, () => fill()),
      count,
    ),
    list.element,
    none,
  );
  fill();
}

// Why a list is empty.
function nothingMatches(what) {
  return `No ${what} matches all words of the filter "${state.view.filter || ""}". A ${what} matches a word in its code, its note, its parameters or its module.`;
}

function matches(node, word) {
  if (word === "is:collective") return Boolean(node.collective);
  if (word === "is:wait") return node.waits;
  return (
    node.code.toLowerCase().includes(word) ||
    node.note.toLowerCase().includes(word) ||
    node.params.some((name) => name.toLowerCase().includes(word)) ||
    Boolean(node.source && node.source.module.toLowerCase().includes(word))
  );
}

// A field for words that all have to match. The words are a part of the address.
function filterField(label, change) {
  let timer = 0;
  return el("input", {
    type: "search",
    class: "filter",
    placeholder: label,
    "aria-label": label,
    value: state.view.filter || "",
    spellcheck: "false",
    oninput: (event) => {
      clearTimeout(timer);
      timer = setTimeout(() => {
        keep({ filter: event.target.value });
        change();
      }, 60);
    },
  });
}

function listingRow(graph, node) {
  const kinds = current.changed ? (graph.changes.get(node.id) || []).map(([kind]) => kind) : [];
  return el(
    "div",
    { class: `line ${kinds[0] || ""}`, title: node.note },
    el("span", { class: "number" }, countText(graph.index.get(node.id) + 1)),
    el("span", { class: "sign", "aria-hidden": true }, kinds.map((kind) => SIGNS[kind]).join("")),
    codeParts(node),
  );
}
