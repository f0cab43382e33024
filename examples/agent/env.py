"""The environment: one process of the agent for each episode, which speaks with the policy that is trained."""

import asyncio
import os
import sys


async def play(prompt, session):
    question, secret = prompt.chat.messages[-1]["content"], str(prompt.facts["secret"])
    async with session.serve(prompt) as endpoint:
        environment = os.environ | endpoint.environment  # OPENAI_BASE_URL, OPENAI_API_KEY
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "agent.py", question, secret),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C stops the run after a step; agents are not to die of it before
        )
        try:
            output, _ = await agent.communicate()
        finally:
            if agent.returncode is None:
                agent.kill()
                await agent.wait()
    if agent.returncode != 0:
        raise RuntimeError(f"the agent ended with status {agent.returncode}")
    return float(output)
