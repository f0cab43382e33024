"""Tokenizers with chat templates of the kinds that models have, made for tests: no real one can be had offline."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from moerl.rollout.tokenizers import build_tokenizer

CHATML_THINKING = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
"""Template like Qwen3's: thinking of earlier turns is dropped; `enable_thinking=false` closes it in a new answer."""

BARS_THINKING = """
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}{%- set ns.system = ns.system + message['content'] -%}{%- endif -%}
{%- endfor -%}
{{- bos_token -}}{{- ns.system -}}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}{{- '<｜User｜>' + message['content'] -}}
    {%- elif message['role'] == 'assistant' -%}
        {%- set content = message['content'].split('</think>')[-1] -%}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' -}}
    {%- elif message['role'] == 'tool' -%}{{- raise_exception('no tools') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜><think>\\n' -}}{%- endif -%}
"""
"""Template like DeepSeek-R1's: no end behind a question, thinking opened by the template, and a start of the text."""

DATED = """
{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{{- '<|im_start|>system\\nToday: ' + date_string + '<|im_end|>\\n' }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Template like Llama 3.1's: the date is that of today unless one is given."""

NO_SYSTEM = """
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Template like Gemma's: a system message is an error."""

SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")


def chat_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with the tokens that the templates write."""
    made = build_tokenizer(["What is it? It is this."], 300, any_text=True, chats=True)
    made.add_special_tokens({"bos_token": SPECIAL[0], "additional_special_tokens": [*SPECIAL[1:]]})
    made.chat_template = template
    return made
