"""Environments of verifiers, unchanged but for what they are about: a game in several turns, and a tool.

Its address and key come from the environment. `python verifiers_agent.py CLIENT KIND [TOKENIZER]` plays one episode of
the kind (`turns` or `tool`) by one of verifiers' own clients (`eval` sends messages, `train` sends token ids), and
prints the episode's score as JSON. Runs with an interpreter that has verifiers.
"""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.clients.client import ModelContext
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

__all__ = ["ChatHarness", "GuessEnv", "GuessTaskset"]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"of": {"type": "array", "items": {"type": "number"}}}},
    },
}


class GuessData(vf.TaskData):
    """Data of a game."""

    secret: int
    kind: str


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    """Rewards the number in the last answer."""

    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        """1 if the last answer is the number."""
        answers = [node.message.content for node in trace.nodes if node.sampled]
        return float(answers[-1] == str(self.data.secret))


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    """One game in turns, and one with a tool."""

    def load(self):
        """Yields both."""
        yield GuessTask(GuessData(prompt="two and two?", secret=7, kind="turns"), self.config.task)
        yield GuessTask(GuessData(prompt="two and two?", secret=4, kind="tool"), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    """One player."""

    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    """Says `more` until the number is found, three times at most."""

    async def run(self, task, agents):
        """Plays one episode."""
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(3):
                if segment.terminated or task.data.kind == "tool" or segment.last_reply == str(task.data.secret):
                    break
                segment = await interaction.turn("more")


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """A loop in this process: asks the model, and adds for it."""

    SUPPORTS_RESUME, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **more):
        """Answers until no tool is called."""
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(message_to_wire, prompt)]
        tools = {"tools": [ADD]} if data.kind == "tool" else {}
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            while True:
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, **tools)
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or ():
                    total = sum(json.loads(call.function.arguments)["of"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
                if not message.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def main(client: str, kind: str, tokenizer: str = "") -> None:
    """Plays one episode."""
    seat = {"harness": {"id": "verifiers_agent"}, "runtime": {"type": "subprocess"}}
    env = load_environment(resolve_env_config({"taskset": {"id": "verifiers_agent"}, "player": seat}))
    where = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key_var": "OPENAI_API_KEY"}
    if client == "eval":
        config = EvalClientConfig(**where)
    else:
        config = TrainClientConfig(**where, renderer_model_name=tokenizer, renderer={"name": "qwen3"})
    ctx = ModelContext(model="policy", client=config)
    (task,) = [each for each in env.taskset if each.data.kind == kind]
    async with env.serving():
        episode = await env.run_episode(task, ctx)
    (trace,) = episode.traces
    errors = [each.message for each in (*episode.errors, *trace.errors)]
    rewards = {name: reward.score for name, reward in trace.rewards.items()}
    tokens = [len(node.token_ids or []) for node in trace.nodes]
    print(json.dumps({"errors": errors, "rewards": rewards, "turns": trace.num_turns, "tokens": tokens}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
