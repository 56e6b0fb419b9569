// The user's model, and beside it the nodes that come from the selected line.

let sourceFile = null;

function drawSource(main) {
  const graph = current.graph,
    sources = current.compile.sources;
  if (!graph) return put(main, notWritten());
  const byFile = new Map();
  for (const node of graph.nodes) {
    if (!node.source) continue;
    if (!byFile.has(node.source.file)) byFile.set(node.source.file, new Map());
    const lines = byFile.get(node.source.file);
    listIn(lines, node.source.line).push(node);
  }
  if (!byFile.size)
    return put(
      main,
      el("p", { class: "muted pad" }, "The nodes of this graph have no source locations."),
    );
  const chosen = state.node !== null && graph.node(state.node);
  if (chosen && chosen.source) sourceFile = chosen.source.file;
  const [keptFile, keptLine] = splitPlace(state.view.line || "");
  if (byFile.has(keptFile)) sourceFile = keptFile;
  if (!byFile.has(sourceFile))
    sourceFile = [...byFile.keys()].find((file) => sources[file]) || [...byFile.keys()][0];
  const lines = byFile.get(sourceFile);
  const text = sources[sourceFile] || sparse(lines);
  let line =
    keptFile === sourceFile && keptLine >= 1 && keptLine <= text.length
      ? keptLine
      : chosen && chosen.source && chosen.source.file === sourceFile
        ? chosen.source.line
        : Math.min(...lines.keys());
  const weight = (number) => (lines.get(number) || []).reduce((sum, node) => sum + node.cost, 0);
  const heaviest = Math.max(1e-9, ...[...lines.keys()].map(weight));
  let lineNodes = [];
  const nodeList = rowList({
    label: "Nodes from the selected line",
    row: (at) =>
      lineNodes[at].fold
        ? foldRow(lineNodes[at], (block) => block.items)
        : listingRow(graph, lineNodes[at]),
    pick: (at) => {
      if (!lineNodes[at].fold) return go({ node: lineNodes[at].id });
      toggleFold(lineNodes[at]);
      return fill();
    },
  });
  const title = el("h3", {});
  const code = rowList({
    label: `Lines of ${sourceFile}`,
    row: (at) => {
      const number = at + 1,
        found = lines.get(number);
      return el(
        "div",
        {
          class: `line source ${found ? "used" : ""} ${number === line ? "chosen" : ""}`,
          title: found ? `${plural(found.length, "node")}, ${timeText(weight(number))}` : "",
        },
        el("span", { class: "number" }, number),
        el("span", { class: "count" }, found ? countText(found.length) : ""),
        el(
          "span",
          { class: "heat" },
          el("i", { style: { width: `${(100 * weight(number)) / heaviest}%` } }),
        ),
        text[at] || "",
      );
    },
    pick: (at) => {
      line = at + 1;
      keep({ line: `${sourceFile}:${line}` });
      fill();
    },
  });
  const fill = () => {
    lineNodes = lines.get(line) || [];
    clear(
      title,
      `line ${line}: `,
      lineNodes.length
        ? `${plural(lineNodes.length, "node")}, ` +
            `${timeText(weight(line))} of compute and communication`
        : "no nodes",
    );
    const layer = (node) => (node.source ? layerOf(node.source.module) : "");
    if (isFolded(graph.nodes.length))
      lineNodes = foldRows(
        together(lineNodes, layer),
        layer,
        `${state.graph}/${state.step}/${sourceFile}:${line}`,
        (node) => node.id === state.node,
      );
    nodeList.fill(
      lineNodes.length,
      lineNodes.findIndex((node) => !node.fold && node.id === state.node),
    );
    code.fill(text.length, line - 1);
  };
  put(
    main,
    el(
      "div",
      { class: "bar" },
      el(
        "select",
        {
          "aria-label": "File",
          onchange: (event) => {
            sourceFile = event.target.value;
            const first = Math.min(...byFile.get(sourceFile).keys());
            keep({ line: `${sourceFile}:${first}` });
            go({ node: null });
            redraw();
          },
        },
        [...byFile.keys()].map((file) =>
          el("option", { value: file, selected: file === sourceFile }, file),
        ),
      ),
      el(
        "span",
        { class: "muted" },
        "Each line shows its number of nodes, and its estimated time as a bar.",
      ),
      foldSwitch(graph.nodes.length, () => fill()),
    ),
    el(
      "div",
      { class: "beside" },
      code.element,
      el("div", { class: "nodes-of" }, title, nodeList.element),
    ),
  );
  fill();
}

// "model.py:31" -> ["model.py", 31].
function splitPlace(place) {
  const at = place.lastIndexOf(":");
  return [place.slice(0, Math.max(at, 0)), Number(place.slice(at + 1))];
}

// Items with those of one layer next to each other. Nodes of one line come from all of its calls, and
// their order says nothing here.
function together(items, layer) {
  const byLayer = new Map();
  for (const item of items) listIn(byLayer, layer(item)).push(item);
  return [...byLayer.values()].flat();
}

// The lines that nodes know, for a file whose text is not in the dump.
function sparse(lines) {
  const text = [];
  for (const [number, lineNodes] of lines) text[number - 1] = lineNodes[0].source.text;
  return Array.from(text, (each) => each || "");
}
