// The listing of a graph, with a filter.

let listingFilter = "";

function drawListing(main) {
  const graph = current.graph;
  if (!graph) return put(main, notWritten());
  let shown = [];
  const list = rowList({
    label: `Nodes of ${state.graph} ${stepName(current.step)}`,
    row: (at) => listingRow(graph, shown[at]),
    pick: (at) => go({ node: shown[at].id }),
  });
  const count = el("span", { class: "muted", role: "status" });
  const fill = () => {
    const words = listingFilter.toLowerCase().split(/\s+/).filter(Boolean);
    shown = graph.nodes.filter((node) => words.every((word) => matches(node, word)));
    clear(
      count,
      shown.length === graph.nodes.length
        ? plural(shown.length, "node")
        : `${shown.length.toLocaleString("en")} of ${plural(graph.nodes.length, "node")}`,
    );
    list.fill(
      shown.length,
      shown.findIndex((node) => node.id === state.node),
    );
  };
  put(
    main,
    el(
      "div",
      { class: "bar" },
      filterField("Filter by name, op, parameter or is:collective", listingFilter, (text) => {
        listingFilter = text;
        fill();
      }),
      count,
    ),
    list.element,
  );
  fill();
}

function matches(node, word) {
  if (word === "is:collective") return Boolean(node.collective);
  if (word === "is:wait") return node.waits;
  return (
    node.code.toLowerCase().includes(word) ||
    node.note.toLowerCase().includes(word) ||
    node.params.some((name) => name.toLowerCase().includes(word))
  );
}

function filterField(label, value, change) {
  let timer = 0;
  return el("input", {
    type: "search",
    class: "filter",
    placeholder: label,
    "aria-label": label,
    value,
    spellcheck: "false",
    oninput: (event) => {
      clearTimeout(timer);
      timer = setTimeout(() => change(event.target.value), 60);
    },
  });
}

function listingRow(graph, node) {
  const kinds = current.changed ? (graph.changes.get(node.id) || []).map(([kind]) => kind) : [];
  return el(
    "div",
    { class: `line ${kinds[0] || ""}`, title: node.note },
    el("span", { class: "number" }, graph.index.get(node.id) + 1),
    el("span", { class: "sign", "aria-hidden": true }, kinds.map((kind) => SIGNS[kind]).join("")),
    codeParts(node),
  );
}

// The memory and cost models cover aten ops, and not the ops that Dynamo captures.
function isModelled(step) {
  return step.level !== "captured";
}

function notModelled() {
  return el(
    "p",
    { class: "muted pad" },
    "This is the graph that Dynamo captured. The memory and cost models start at the joint graph.",
  );
}

function notWritten() {
  return [
    failure(current.step.error, "This pass failed"),
    el("p", { class: "muted pad" }, "The dump does not contain this graph."),
  ];
}
