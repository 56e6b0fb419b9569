// The graph as text, with a filter.

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
    shown = graph.nodes.filter((form) => words.every((word) => matches(form, word)));
    clear(count, shown.length === graph.nodes.length ? plural(shown.length, "node") : `${shown.length.toLocaleString("en")} of ${plural(graph.nodes.length, "node")}`);
    list.fill(shown.length, shown.findIndex((form) => form.id === state.node));
  };
  put(main, el("div", { class: "bar" }, filterField("Filter nodes: a name, op, parameter, or is:collective", listingFilter, (text) => { listingFilter = text; fill(); }), count), list.element);
  fill();
}

function matches(form, word) {
  if (word === "is:collective") return Boolean(form.collective);
  if (word === "is:wait") return form.waits;
  return form.code.toLowerCase().includes(word) || form.note.toLowerCase().includes(word) || form.params.some((name) => name.toLowerCase().includes(word));
}

function filterField(label, value, change) {
  let timer = 0;
  return el("input", {
    type: "search", class: "filter", placeholder: label, "aria-label": label, value, spellcheck: "false",
    oninput: (event) => { clearTimeout(timer); timer = setTimeout(() => change(event.target.value), 60); },
  });
}

function listingRow(graph, form) {
  const kinds = current.changed ? (graph.changes.get(form.id) || []).map(([kind]) => kind) : [];
  return el("div", { class: `line ${kinds[0] || ""}`, title: form.note },
    el("span", { class: "number" }, graph.index.get(form.id) + 1),
    el("span", { class: "sign", "aria-hidden": true }, kinds.map((kind) => SIGNS[kind]).join("")),
    codeParts(form));
}

// The models of memory and cost know aten, and not what Dynamo captures.
function isModelled(step) { return step.level !== "captured"; }

function notModelled() {
  return el("p", { class: "muted pad" }, "This is the graph that Dynamo captured: no memory and no times are modelled for it, but for the joint graph and all after it.");
}

function notWritten() {
  return [failure(current.step.error, "This pass failed"), el("p", { class: "muted pad" }, "This graph was not written.")];
}
