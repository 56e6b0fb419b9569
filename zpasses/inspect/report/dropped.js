// A second report that is dropped onto the page, or chosen as a file. Only its data is read: it is
// parsed as JSON and shown as text, and nothing of it is executed.

const REPORT_BYTES = 256 * 2 ** 20;

function addReportField() {
  return el(
    "label",
    { class: "add-report", title: "Another report.html. You can also drop it onto this page." },
    "Add a report ",
    el("input", {
      type: "file",
      accept: ".html,text/html",
      "aria-label": "Add a report",
      onchange: (event) => addReport(event.target.files[0]),
    }),
  );
}

async function addReport(file) {
  if (!file) return;
  try {
    if (file.size > REPORT_BYTES) throw new Error(`it has ${bytesText(file.size)}`);
    const found = dataOf(await file.text());
    const before = compiles.length;
    const label = `${found.path.split("/").slice(-1)[0] || file.name}`;
    const known = new Set(compiles.map((each) => each.dump));
    for (const data of found.compiles) {
      const dump = known.has(data.dump || label) ? `${label} (${file.name})` : data.dump || label;
      compiles.push(checkedCompile({ ...data, dump }));
    }
    if (compiles.length === before) throw new Error("it contains no compile");
    const same = compiles.slice(before).find((each) => each.graphs.length);
    drawHeader();
    if (same) keep({ with: "", other: "", swap: "" });
    go({ tab: "compare" });
  } catch (error) {
    notice = `${file.name} cannot be added: ${error.message}. Expected a report.html of this version.`;
    redraw();
  }
}

function dataOf(text) {
  const start = text.indexOf('id="data">');
  const end = text.indexOf("<\/script>", start);
  if (start < 0 || end < 0) throw new Error("it is no report");
  let found;
  try {
    found = JSON.parse(text.slice(start + 'id="data">'.length, end));
  } catch {
    throw new Error("its data is damaged or cut off");
  }
  if (found.format !== report.format || !Array.isArray(found.compiles))
    throw new Error("another version of zpasses wrote it");
  return found;
}

// Builds the last graphs at once, so that damaged data is refused and not shown in part.
function checkedCompile(data) {
  const compile = new Compile(data);
  for (const graph of compile.graphs) {
    const shown = compile.at(graph, compile.last(graph));
    if (shown && shown.nodes.some((node) => typeof node.name !== "string"))
      throw new Error("its nodes are damaged");
  }
  return compile;
}

addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  addReport(event.dataTransfer.files[0]);
});
