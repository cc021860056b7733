// Asking the proxy. Addresses are relative to the page's, so that it also works under a path of another server.

const DEADLINE_MS = 10_000;

export class Gone extends Error {}
class Answered extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}
export class Unauthorized extends Answered {}
export class Refused extends Answered {}

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store", signal: AbortSignal.timeout(DEADLINE_MS) });
  } catch {
    throw new Gone("The proxy does not answer");
  }
  if (response.status === 401 || response.status === 403) throw new Unauthorized(response.status, "A key is needed");
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Refused(response.status, body?.error?.message ?? `The proxy answered ${response.status}`);
  }
  return response;
}

/** Return what the admin API says. Throws Gone, Unauthorized or Refused. */
export async function get(path) {
  const response = await ask(path);
  try {
    return await response.json();
  } catch {
    throw new Gone("The proxy's answer broke off");
  }
}

/** Trade a key for the cookie that further requests carry. */
export async function login(key) {
  await ask("dashboard/login", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ key }),
  });
}

export const pathOf = (programId) => `programs/${encodeURIComponent(programId)}`;
