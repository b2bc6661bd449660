"""Chat templates that write as those of well-known models do, each with marks of what the assistant generates, or without.

`<G>` and `</G>` stand where `{% generation %}` and `{% endgeneration %}` would be added by hand.
"""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}<G>{{ m.content }}<|im_end|></G>"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

#: tools in the system turn, thoughts only after the last question, answers of tools as a user's turn
QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') + 'Tools:\n<tools>' }}
    {%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\n</tools>\nCall with {"name": ...}<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(looking=true, last_query=messages | length - 1) %}
{%- for m in messages[::-1] %}
    {%- set text = m.content if m.content is string else '' %}
    {%- set from_tool = text.startswith('<tool_response>') and text.endswith('</tool_response>') %}
    {%- if ns.looking and m.role == 'user' and m.content is string and not from_tool %}
        {%- set ns.looking = false %}
        {%- set ns.last_query = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}<G>
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if content or not loop.first %}{{ '\n' }}{% endif %}
            {%- set call = call.function or call %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}</G>{{ '\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""

#: texts trimmed, tools before the first question, a call instead of its turn's text
LLAMA3 = r"""
{{- bos_token }}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system + '<|eot_id|>' }}
{%- for m in turns %}
    {%- if m.role == 'assistant' and 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}<G>{{ '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{ '}<|eot_id|>' }}</G>
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if m.content is mapping %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}{{ '<|eot_id|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}<G>{{ m.content | trim + '<|eot_id|>' }}</G>
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
        {%- if tools is not none and loop.first %}
            {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}
        {%- endif %}
        {{- m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

#: no prompt at all; system and tools come with the last question, so earlier text changes with every turn
MISTRAL = r"""
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- set ns = namespace(last=-1) %}
{%- for m in turns %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system + '\n\n' if system and loop.index0 == ns.last else '') + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '' }}<G>{{ '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}{{ call.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}
        {{- ']' + eos_token }}</G>
    {%- elif m.role == 'assistant' %}
        {{- '' }}<G>{{ ' ' + m.content | trim + eos_token }}</G>
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' }}{{ m.content | tojson }}{{ '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

#: prompts end with a space, which a turn's first token may hold
SPACED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}ASSISTANT: <G>{{ m.content }}{{ eos_token }}</G>"
    "{% else %}{{ m.role | upper }}: {{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
#: prompts end without the space that the model then writes
UNSPACED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}ASSISTANT:<G> {{ m.content }}{{ eos_token }}</G>"
    "{% else %}{{ m.role | upper }}: {{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
#: the prompt begins a thought, of which earlier turns show nothing
THINKING_PROMPT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}<G>"
    "{% if loop.last and m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content }}<|im_end|></G>{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)

TEMPLATES = {
    "chatml": CHATML,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "spaced": SPACED,
    "unspaced": UNSPACED,
}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]")


def marked(template: str) -> str:
    """The template with the tags added."""
    return template.replace("<G>", "{% generation %}").replace("</G>", "{% endgeneration %}")


def unmarked(template: str) -> str:
    """The template as its authors publish it."""
    return template.replace("<G>", "").replace("</G>", "")
