// Names on canvases. A name that has no room is shortened to what tells it from others: the number
// of its layer, and its end.

const LEAST_TEXT = 18; // Pixels below which a box has no text.

// The name, and ever shorter forms of it:
// "model.layers.33.mlp.up_proj.weight", "layers.33.mlp.up_proj.weight", "33.mlp.up_proj.weight",
// "33…up_proj.weight", "33". Names without a number lose their first parts.
const shortNames = perModule((name) => {
  const parts = name.split(".");
  const layer = parts.findIndex((part) => /^(\d+|\*)$/.test(part));
  const last = layer < 0 ? parts.length - 1 : layer;
  const found = parts.slice(0, last + 1).map((_, at) => parts.slice(at).join("."));
  const rest = layer < 0 ? [] : parts.slice(layer + 1);
  if (rest.length > 2) found.push(`${parts[layer]}…${rest.slice(-2).join(".")}`);
  if (rest.length) found.push(parts[layer]);
  return found;
});

// The first of the texts that fits. If none does, the end of the last one, or "" if its number does
// not fit.
function fittingText(pen, texts, room) {
  const found = texts.find((text) => pen.measureText(text).width <= room);
  if (found !== undefined) return found;
  const last = texts[texts.length - 1];
  if (/^\W*\d+\W*$/.test(last)) return "";
  for (let cut = 1; last.length - cut >= 4; cut++) {
    const text = `…${last.slice(cut)}`;
    if (pen.measureText(text).width <= room) return text;
  }
  return "";
}

// The label of a collective: its first parameter, and how many more it has.
function collectiveTexts(node) {
  const more = node.params.length > 1 ? ` +${countText(node.params.length - 1)}` : "";
  const names = node.params.length ? shortNames(node.params[0]) : [node.name];
  const texts = names.map((name) => name + more);
  return more ? [...texts, names[names.length - 1]] : texts;
}
