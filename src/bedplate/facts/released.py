"""The year in which each model's weights were published. At the same size, newer models are more capable."""

from __future__ import annotations

from functools import lru_cache

from bedplate.facts.known_models import parse_model_name

# Keys are prefixes of normalized names. The longest match counts.
_YEARS: dict[int, str] = {
    2018: "bertbase",
    2021: "allminilm allmpnet",
    2023: """
        yi34b bgebase bgelarge bgesmall tinyllama codellama llama7b llama13b llama33b llama65b llama2 internlm20b
        openllama mistral7b0.1 mixtral8x7b e5base e5large multilinguale5 falcon7b whisperlarge3""",
    2024: """
        c4aicommandr01 bgem3 bgereranker2 smollm2 hermes3llama3.1 qwen2 ai21jamba1.5 olmo2 starcoder2 deepseekcoder2
        deepseek2 deepseek3 gemma2 internlm2 llama3 phi3 phi4 ministral8b2410 mistral7b0.3 mistrallarge2407
        mistralnemo2407 mixtral8x22b mxbaiembed llama3.1nemotron70b whisperlarge3turbo""",
    2025: """
        smollm3 lfm2 minimaxtext01 minimaxm1 minimaxm2 qwq qwen3 mimo deepseekr1 deepseek30324 deepseek3.1 deepseek3.2
        gemma3 granite3.3 llama4 phi4mini devstralsmall2505 mistralsmall24b2501 mistralsmall3.1 mistralsmall3.2 kimik2
        kimilinear llama3.3nemotronsuper nemotron3nano30b nemotronnano9b2 nemotronh gptoss dotsllm1 shisa2 hunyuana13b
        falconh1 glm4.5 glm4.6 glm4.7""",
    2026: """
        lfm2.5 minimaxm2.5 minimaxm2.7 minimaxm3 qwen3codernext qwen3.5 qwen3.6 deepseek4 gemma4 kimik2.5 kimik2.6
        kimik2.7 kimik3 glm4.7flash glm5 nemotron3nano4b nemotron3super nemotron3ultra nemotron3.5 step3.7""",
}


@lru_cache(maxsize=1)
def _list_beginnings() -> tuple[tuple[str, int], ...]:
    pairs = [(word, year) for year, words in _YEARS.items() for word in words.split()]
    return tuple(sorted(pairs, key=lambda pair: -len(pair[0])))


def find_release_year(name: str) -> int | None:
    """The year of the model with this common name; `None` if it is not listed."""
    key = parse_model_name(name).key
    return next((year for word, year in _list_beginnings() if key.startswith(word)), None)
