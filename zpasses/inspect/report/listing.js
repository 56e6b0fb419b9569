// The listing of a graph, with a filter.

function drawListing(main) {
  const graph = current.graph;
  if (!graph) return put(main, notWritten());
  const count = el("span", { class: "muted", role: "status" });
  const none = el("p", { class: "muted pad", role: "status", hidden: true });
  const nodesNow = () => {
    const words = filterWords();
    const found = graph.nodes.filter((node) => words.every((word) => matches(node, word)));
    const all = plural(graph.nodes.length, "node");
    const some = found.length < graph.nodes.length;
    clear(count, some ? `${countText(found.length)} of ${all}` : all);
    none.hidden = found.length > 0;
    clear(none, graph.nodes.length ? nothingMatches("node") : "This graph has no nodes.");
    if (!isFolded(graph.nodes.length)) return found;
    const layers = layersOf(graph);
    const where = `${state.graph}/${state.step}`;
    return foldRows(found, (node) => layers.get(node.id), where, isChosen);
  };
  const list = nodeList(graph, `Nodes of ${state.graph} ${stepName(current.step)}`, nodesNow);
  const fill = () => list.fill();
  const field = filterField("Filter by name, op, parameter, module or is:collective", fill);
  put(main, bar(field, foldSwitch(graph.nodes.length, fill), count), list.element, none);
  fill();
}

const filterWords = () => (state.view.filter || "").toLowerCase().split(/\s+/).filter(Boolean);

// Why a list is empty.
function nothingMatches(what) {
  return (
    `No ${what} matches all words of the filter "${state.view.filter || ""}". A ${what} matches a ` +
    "word in its code, its note, its parameters or its module."
  );
}

function matches(node, word) {
  if (word === "is:collective") return Boolean(node.collective);
  if (word === "is:wait") return node.waits;
  const texts = [node.code, node.note, ...node.params, moduleOfLine(node)];
  return texts.some((text) => text.toLowerCase().includes(word));
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
    span("number", countText(graph.index.get(node.id) + 1)),
    el("span", { class: "sign", "aria-hidden": true }, signs(kinds)),
    codeParts(node),
  );
}
