# company.py
from openai import AsyncOpenAI

from thunderagent_workflows.llm import async_http_client


class Model:
    """What all three share: one client whose turns bear the session that they belong to."""

    def __init__(self):
        self.http = async_http_client()
        self.client = AsyncOpenAI(base_url="http://127.0.0.1:8300/v1", api_key="none", http_client=self.http)

    async def say(self, text):
        messages = [{"role": "user", "content": text}]
        answer = await self.client.chat.completions.create(model="simulated", messages=messages, max_tokens=8)
        return answer.choices[0].message.content

    async def close(self):
        await self.client.close()


class Planner(Model):
    async def split(self, goal: str):
        await self.say(f"Split into parts: {goal}")
        return [f"{goal}, part {number}" for number in range(3)]


class Developer(Model):
    async def build(self, part: str, attempt: int):
        return {"part": part, "attempt": attempt, "code": await self.say(f"Write, attempt {attempt}: {part}")}


class Tester(Model):
    async def check(self, built: dict):
        await self.say(f"Test: {built['code']}")
        return {**built, "ok": built["attempt"] >= 2}
