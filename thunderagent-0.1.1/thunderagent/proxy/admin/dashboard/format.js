// How figures are written.

const WHOLE = new Intl.NumberFormat("en");
const ONE = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const NONE = "–";

export const whole = (number) => (number === null || number === undefined ? NONE : WHOLE.format(Math.round(number)));

/** 950, 14.2k, 1.3M: three digits that say how much it is. */
export function short(number) {
  if (number === null || number === undefined) return NONE;
  const size = Math.abs(number);
  for (const [limit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= limit) return (size >= 100 * limit ? WHOLE.format(Math.round(number / limit)) : ONE.format(number / limit)) + letter;
  }
  return size < 10 && !Number.isInteger(number) ? ONE.format(number) : WHOLE.format(Math.round(number));
}

export function percent(ratio) {
  return ratio === null || ratio === undefined ? NONE : `${Math.round(100 * ratio)} %`;
}

/** 40 ms, 400 ms, 1.2 s, 12 s, 3 min 20 s, 2 h 5 min. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 0.0005) return "0 s";
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 9.95) return `${ONE.format(seconds)} s`;
  const all = Math.round(seconds);
  if (all < 60) return `${all} s`;
  if (all < 3600) return all % 60 ? `${Math.floor(all / 60)} min ${all % 60} s` : `${all / 60} min`;
  const minutes = Math.floor(all / 60) % 60;
  return minutes ? `${Math.floor(all / 3600)} h ${minutes} min` : `${Math.floor(all / 3600)} h`;
}

export const count = (number, one, many = `${one}s`) => `${whole(number)} ${number === 1 ? one : many}`;

/** The tokens that engines computed for a program: prompts without what was cached, and output. */
export const computedOf = (program) => program.prompt_tokens_total - program.cached_tokens_total + program.output_tokens_total;

/** What a program is doing, in a word: its status and its phase are two sides of it. */
export function stateOf(program) {
  if (program.status === "active") return program.phase;
  return program.phase === "reasoning" ? "held" : "paused";
}

const REASONS = {
  anonymous: "the turn names no program",
  home: "it has its claim there already",
  fits: "its claim fits beside the others",
  oversize: "it is larger than every replica: the engine decides",
  policy: "the policy places by other things than memory",
  no_room: "no replica has room for its claim",
  queue_ahead: "others come before it in the queue",
  no_replica: "no replica is usable",
  thrashing: "programs claim more than the replica's memory",
  expired: "its tool runs longer than its memory is worth holding for, and others need the room",
  leaving: "the program leaves its replica, once its turns in flight there have ended",
  marked: "the turns in flight of a marked program ended",
  turn_failed: "a turn of it failed there, and is tried elsewhere",
  idle: "its tool runs longer than the idle limit",
  replica_down: "its replica is gone",
  replica_draining: "its replica gets nothing new",
  suspended: "engines are paused, asleep, or get new weights",
  moved: "it goes to another replica",
  relieved: "there is room again",
  stays: "what it was to leave for is over",
  released: "its client released it",
  forgotten: "nothing was heard of it for longer than the forget limit",
};

/** A reason as a sentence; what is no reason that is known stays as it is. */
export const because = (reason) => REASONS[reason] ?? reason ?? "";
