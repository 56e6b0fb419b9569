// The user's model beside the nodes that came from it.

let sourceFile = null;

function drawSource(main) {
  const graph = current.graph, sources = current.compile.sources;
  if (!graph) return put(main, notWritten());
  const byFile = new Map();
  for (const form of graph.nodes) {
    if (!form.source) continue;
    if (!byFile.has(form.source.file)) byFile.set(form.source.file, new Map());
    const lines = byFile.get(form.source.file);
    listIn(lines, form.source.line).push(form);
  }
  if (!byFile.size) return put(main, el("p", { class: "muted pad" }, "The nodes of this graph do not say where they came from."));
  const chosen = state.node !== null && graph.node(state.node);
  if (chosen && chosen.source) sourceFile = chosen.source.file;
  if (!byFile.has(sourceFile)) sourceFile = [...byFile.keys()].find((file) => sources[file]) || [...byFile.keys()][0];
  const lines = byFile.get(sourceFile);
  const text = sources[sourceFile] || sparse(lines);
  let line = chosen && chosen.source ? chosen.source.line : Math.min(...lines.keys());
  const weight = (number) => (lines.get(number) || []).reduce((sum, form) => sum + form.cost, 0);
  const heaviest = Math.max(1e-9, ...[...lines.keys()].map(weight));
  let forms = [];
  const nodes = rowList({ label: "Nodes from the chosen line", row: (at) => listingRow(graph, forms[at]), pick: (at) => go({ node: forms[at].id }) });
  const title = el("h3", {});
  const code = rowList({
    label: `Lines of ${sourceFile}`,
    row: (at) => {
      const number = at + 1, found = lines.get(number);
      return el("div", { class: `line source ${found ? "used" : ""} ${number === line ? "chosen" : ""}`, title: found ? `${plural(found.length, "node")}, ${timeText(weight(number))}` : "" },
        el("span", { class: "number" }, number),
        el("span", { class: "count" }, found ? found.length : ""),
        el("span", { class: "heat" }, el("i", { style: { width: `${100 * weight(number) / heaviest}%` } })),
        text[at] || "");
    },
    pick: (at) => { line = at + 1; fill(); },
  });
  const fill = () => {
    forms = lines.get(line) || [];
    clear(title, `line ${line}: `, forms.length ? `${plural(forms.length, "node")}, ${timeText(weight(line))} of compute and communication` : "no node came from here");
    nodes.fill(forms.length, forms.findIndex((form) => form.id === state.node));
    code.fill(text.length, line - 1);
  };
  put(main,
    el("div", { class: "bar" },
      el("select", { "aria-label": "File", onchange: (event) => { sourceFile = event.target.value; go({ node: null }); redraw(); } },
        [...byFile.keys()].map((file) => el("option", { value: file, selected: file === sourceFile }, file))),
      el("span", { class: "muted" }, "Numbers count the nodes of a line; bars are its time by the model.")),
    el("div", { class: "beside" }, code.element, el("div", { class: "nodes-of" }, title, nodes.element)));
  fill();
}

// Where the file itself is not in the dump: the lines that nodes know.
function sparse(lines) {
  const text = [];
  for (const [number, forms] of lines) text[number - 1] = forms[0].source.text;
  return Array.from(text, (each) => each || "");
}
