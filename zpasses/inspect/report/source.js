// The user's model, and beside it the nodes that come from the selected line.

let sourceFile = null;

function drawSource(main) {
  const graph = current.graph,
    sources = current.compile.sources;
  if (!graph) return put(main, notWritten());
  const byFile = new Map();
  for (const node of graph.nodes) {
    if (!node.source) continue;
    const { file, line } = node.source;
    if (!byFile.has(file)) byFile.set(file, new Map());
    listIn(byFile.get(file), line).push(node);
  }
  if (!byFile.size)
    return put(main, remark("The nodes of this graph have no source locations."));
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
  const weight = (number) => sumOf(lines.get(number) || [], (node) => node.cost);
  const heaviest = Math.max(1e-9, ...[...lines.keys()].map(weight));
  const title = el("h3", {});
  const layer = (node) => layerOf(moduleOfLine(node));
  const nodesNow = () => {
    const found = lines.get(line) || [];
    const time = `${timeText(weight(line))} of compute and communication`;
    const what = found.length ? `${plural(found.length, "node")}, ${time}` : "no nodes";
    clear(title, `line ${line}: `, what);
    if (!isFolded(graph.nodes.length)) return found;
    const where = `${state.graph}/${state.step}/${sourceFile}:${line}`;
    return foldRows(together(found, layer), layer, where, isChosen);
  };
  const nodes = nodeList(graph, "Nodes from the selected line", nodesNow);
  const code = rowList({
    label: `Lines of ${sourceFile}`,
    row: (at) => {
      const number = at + 1,
        found = lines.get(number),
        share = (100 * weight(number)) / heaviest;
      return el(
        "div",
        {
          class: `line source ${found ? "used" : ""} ${number === line ? "chosen" : ""}`,
          title: found ? `${plural(found.length, "node")}, ${timeText(weight(number))}` : "",
        },
        span("number", number),
        span("count", found ? countText(found.length) : ""),
        span("heat", el("i", { style: { width: `${share}%` } })),
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
    nodes.fill();
    code.fill(text.length, line - 1);
  };
  const files = [...byFile.keys()].map((file) => option(file, file === sourceFile, file));
  const showFile = (file) => {
    sourceFile = file;
    keep({ line: `${file}:${Math.min(...byFile.get(file).keys())}` });
    go({ node: null });
    redraw();
  };
  put(
    main,
    bar(
      choice("File", files, showFile),
      muted("Each line shows its number of nodes, and its estimated time as a bar."),
      foldSwitch(graph.nodes.length, fill),
    ),
    el(
      "div",
      { class: "beside" },
      code.element,
      el("div", { class: "nodes-of" }, title, nodes.element),
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
