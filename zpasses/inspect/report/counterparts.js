// Which step of another compile's graph a step is compared with: the one after the same pass.

// Returns {step, why}: an index in `other.graphs`' steps, and why it is not the same pass, or "".
function counterpart(data, step, otherCompile, other) {
  const shown = data.steps[step];
  const last = otherCompile.last(other);
  const found = sameStep(data, step, other);
  if (found === null)
    return {
      step: last,
      why:
        `That graph has no pass "${passOf(shown)}", so this is its last step, ` +
        `"${stepName(other.steps[last])}".`,
    };
  const its = other.steps[found.step];
  if (its.error || !otherCompile.stepWithGraph(other, found.step).order)
    return {
      step: last,
      why:
        `The pass "${stepName(its)}" left no complete graph there, so this is the last ` +
        `complete step, "${stepName(other.steps[last])}".`,
    };
  const more = other.steps.slice(found.step + 1, last + 1).length;
  if (!found.why && step === data.steps.length - 1 && more)
    return {
      ...found,
      why:
        `This is the same pass. In that graph, ${more} more ` +
        `${more === 1 ? "pass follows" : "passes follow"} it; in the shown one, none does.`,
    };
  return found;
}

// The step after the same pass: the n-th of its name, with the same options if there is one.
function sameStep(data, step, other) {
  const shown = data.steps[step];
  if (!shown.after) return { step: 0, why: "" };
  const own = places(data, (each) => passOf(each) === passOf(shown));
  const its = places(other, (each) => passOf(each) === passOf(shown));
  if (!its.length) return null;
  const place = own.indexOf(step);
  if (own.length === its.length) return { step: its[place], why: "" };
  const equal = its.filter((at) => other.steps[at].after === shown.after);
  const equalPlace = own.filter((at) => data.steps[at].after === shown.after).indexOf(step);
  const found = equal[equalPlace] ?? its[place] ?? its[its.length - 1];
  return {
    step: found,
    why:
      `The pass "${passOf(shown)}" runs ${plural(own.length, "time")} in the shown graph and ` +
      `${plural(its.length, "time")} in that one. This is number ${its.indexOf(found) + 1} of them.`,
  };
}

// "schedule{cap_mb=12.0}" -> "schedule".
function passOf(step) {
  return (step.after || "").split("{")[0];
}

function places(data, matches) {
  return data.steps.flatMap((each, at) => (matches(each) ? [at] : []));
}
