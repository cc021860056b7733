import httpx2


class LeasedRouter:
    """A router of verl: each turn waits for its lease, and runs on the engine that the lease names."""

    def __init__(self, servers, config):
        self._asking = {"base_url": config["proxy_url"], "headers": config.get("headers")}
        self._client = httpx2.AsyncClient(**self._asking, timeout=None, limits=httpx2.Limits(max_connections=None))
        self._handles = {}
        self._listed = set()
        self._leases = {}  # (server_id, request_id): [(lease_id, prompt_tokens)]
        self.add_servers(servers)

    def require_acquire_fields(self):
        return ["prompt_ids"]

    def require_release_fields(self):
        return ["request_id"]

    async def acquire_server(self, request_id, prompt_ids=()):
        asked = {"program_id": request_id, "prompt_tokens": len(prompt_ids)}
        answer = (await self._client.post("/leases", json=asked)).raise_for_status().json()
        server_id = answer["replica_id"]
        self._leases.setdefault((server_id, request_id), []).append((answer["lease_id"], len(prompt_ids)))
        return server_id, self._handles[server_id]

    async def release_server(self, server_id, request_id=None):
        held = self._leases.get((server_id, request_id))
        if not held:
            return
        lease_id, prompt_tokens = held.pop()
        if not held:
            del self._leases[server_id, request_id]
        await self._client.post(f"/leases/{lease_id}/end", json={"prompt_tokens": prompt_tokens})

    def add_servers(self, servers):
        self._handles.update(servers)
        self._listed.update(servers)
        with httpx2.Client(**self._asking) as client:
            for server_id in servers:
                client.post("/replicas", json={"url": f"http://{server_id}"}).raise_for_status()

    def remove_servers(self, server_ids):
        self._listed.difference_update(server_ids)
        with httpx2.Client(**self._asking) as client:
            for server_id in server_ids:
                client.delete(f"/replicas/{server_id}")  # it drains first

    def get_all_servers(self):
        return list(self._listed)

    def get_total_inflight(self):
        return sum(map(len, self._leases.values()))

    def get_status(self):
        return {"active_servers": len(self._listed), "total_inflight": self.get_total_inflight()}

    def clear_sticky_cache(self):
        return {"cleared_entries": 0, "server_loads": {}}  # where a program goes is the proxy's matter
