/* The drill-downs' single records, below what the snapshot says of a stage.

   Consumes    /records.json?view=NAME: launch/monitor/web_records.py
   Produces    elements, by the name of the view
   Waits for   nothing
   Invariant   times are differences of recorded ones; what is not recorded is "-" */

const between = (from_s, to_s) => known(from_s) && known(to_s) ? to_s - from_s : null;

function groupRows(groups) { // a click on one opens its first trajectory
  return groups.map(one => {
    const state = one.drop_reason ? `dropped: ${one.drop_reason.replaceAll("_", " ")}` : one.state;
    return {"data-group": one.group, cells: [
      String(one.group), [one.problem, "name"], state, figure(one.age, 0), `${one.base} to ${one.deadline}`,
      `${one.num_finished} of ${one.num_rollouts}`, figure(one.step, 0)]};
  });
}

function groupTables({active, closed}) {
  const head = ["Group", "problem", "ticket", "#age", "#base to deadline", "#finished", "#step"];
  const oldest = [...active].sort((one, other) => other.age - one.age || one.group - other.group);
  return [
    heading("Active groups, the oldest first"), active.length ? table(head, groupRows(oldest)) : soft("none"),
    heading("The newest closed ones"), closed.length ? table(head, groupRows(closed)) : soft("none")];
}

function callTable({calls}) {
  const rows = calls.map(one => ({"data-group": one.group, "data-rollout": one.rollout, cells: [
    clock(one.unix_s), `${one.group} / ${one.rollout} / ${one.turn}`,
    [one.status, one.status === "ok" ? "" : "warn"], seconds(one.queue_s), seconds(one.run_s),
    [one.code.slice(0, 200), "mono"]]}));
  return [
    heading("The newest calls"),
    rows.length ? table(["At", "group / rollout / turn", "status", "#waited", "#ran", "code"], rows) : soft("none")];
}

function stepTimes(one) {
  const loaded_s = one.acks.length ? Math.max(...one.acks.map(ack => ack.unix_s)) : null;
  const parts = {
    fetch: between(one.taken_unix_s, one.fetched_unix_s), train: between(one.fetched_unix_s, one.trained_unix_s),
    publish: between(one.trained_unix_s, one.published_unix_s), load: between(one.published_unix_s, loaded_s)};
  return {...one, parts, total_s: Object.values(parts).reduce((sum, value) => sum + Math.max(0, value ?? 0), 0)};
}

function stepTimeline({steps}) {
  const kinds = {fetch: "starved", train: "busy", publish: "blocked", load: "sync"};
  const times = steps.map(stepTimes), longest = Math.max(...times.map(one => one.total_s));
  const rows = times.map(one => [
    String(one.step), clock(one.taken_unix_s),
    [bar(Object.entries(kinds).map(([part, kind]) => [kind, one.parts[part] / longest])), "wide"],
    ...Object.keys(kinds).map(part => seconds(one.parts[part])), figure(one.reward, 2), figure(one.age, 2)]);
  const head = ["Step", "taken", "", "#fetch", "#train", "#publish", "#load", "#reward", "#age"];
  return [
    heading("The newest steps, from the batch to engines that use them"),
    legend(Object.entries(kinds).map(([part, kind]) => [kind, part])),
    rows.length ? table(head, rows) : soft("none")];
}

function versionTable({versions}) {
  const rows = versions.flatMap(one => one.acks.map((ack, index) => [
    index ? "" : String(one.version), index ? "" : clock(one.published_unix_s), ack.engine,
    seconds(between(one.published_unix_s, ack.unix_s)), seconds(ack.pause_s)]).concat(
    one.acks.length ? [] : [[String(one.version), clock(one.published_unix_s), "none yet", "-", "-"]]));
  return [
    heading("The newest versions"), table(["Version", "published", "loaded by", "#after", "#of it paused"], rows)];
}

function trajectoryText({lines, moves}) { // "---- " begins a part
  const parts = lines.join("\n").split(/^---- /m).filter(Boolean).map(part => {
    const [title, ...rest] = part.split("\n");
    return [heading(title), make("pre", {}, rest.join("\n").trimEnd())];
  });
  const buttons = moves.map(move => make("button", {"data-move": move}, move));
  return [make("p", {class: "row"}, ...buttons), ...parts.flat()];
}

const RECORDED = {
  sandbox: callTable, groups: groupTables, learner: stepTimeline, weights: versionTable, trajectory: trajectoryText,
};
