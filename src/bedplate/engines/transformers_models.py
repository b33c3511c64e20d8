"""Architectures that Transformers implements itself: `model_type` values of its versions.

Other models bring Python code in their repository. Engines run it only with `--trust-remote-code`, which bedplate does
not set: it would be code that nobody here has read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bedplate.values import Model, Refusal

if TYPE_CHECKING:
    from bedplate.engines.base import Engine

_GENERATE = """
afmoe apertus arcee aria aria_text audioflamingo3 axk1 axk2 aya_vision bailing_hybrid bamba bart beam bert
bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small blip blip-2 bloom blt camembert
chameleon codegen cohere cohere2 cohere2_moe cohere2_vision cohere_compass cohere_compass_text cosmos3_edge cosmos3_omni
cpmant ctrl cwm data2vec-text dbrx deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl
deepseek_vl_hybrid diffllama diffusion_gemma doge dots1 electra emu3 encoder-decoder ernie ernie4_5 ernie4_5_moe
ernie4_5_vl_moe evolla exaone4 exaone4_5 exaone_moe falcon falcon_h1 falcon_mamba fast_vlm flex_olmo flint florence2
fsmt fun_asr_nano fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_assistant gemma4_text
gemma4_unified gemma4_unified_assistant gemma4_unified_text git glm glm4 glm46v glm4_moe glm4_moe_lite glm4v glm4v_moe
glm5_next glm_moe_dsa glm_ocr glmasr glmga got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss
gptj granite granite4_vision granite_speech granite_speech_plus granite_swa granitemoe granitemoe_swa granitemoehybrid
granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hy_v3 hy_v4 hyperclovax
hyperclovax_vision_v2 idefics idefics2 idefics3 inkling_mm_model inkling_text instructblip instructblipvideo internvl
jais2 jamba janus jetmoe kimi_k25 kimi_linear kolibri1 kosmos-2 kosmos-2.5 kyutai_speech_to_text laguna led lfm2
lfm2_moe lfm2_vl lighton_ocr llama llama4 llama4_text llava llava_next llava_next_video llava_onevision longcat_flash
longt5 m2m_100 mamba mamba2 marian mbart megatron-bert mellum mimo_v2_flash minicpm3 minicpm_ocr minicpmv4_6 minicpmv4_7
minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral ministral3 mistral mistral3 mistral4 mistral_large4
mixtral mllama modernbert-decoder molmo2 moshi moss_transcribe_diarize mpt mt5 muse_glimmer muse_spark musicflamingo
musicgen musicgen_melody mvp nanochat nemo_speechlm nemotron nemotron_h nemotron_h_omni nllb-moe olmo olmo2 olmo3
olmo_hybrid olmoe openai-gpt opt ovis2 paddleocr_vl paligemma pegasus pegasus_x perception_lm persimmon phi phi3
phi4_multimodal phimoe pi0 pix2struct plbart pp_chart2table pp_formulanet prophetnet qianfan_ocr qwen2 qwen2_5_omni
qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp qwen4_exp_text
recurrent_gemma reformer rembert roberta roberta-prelayernorm roc_bert roformer rwkv seamless_m4t seamless_m4t_v2
seed_oss shieldgemma2 smollm3 smolvlm solar_open stablelm starcoder2 step3p7 switch_transformers t5 t5gemma t5gemma2
trocr udop umt5 unlimited_ocr vaultgemma vibevoice_asr video_llama_3 video_llava vipllava vision-encoder-decoder voxtral
voxtral_realtime whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod youtu zamba zamba2 zaya
"""
_OTHERS = """
albert canary canine clip_text_model cohere_asr convbert deberta deberta-v2 dia distilbert esm esmc eurobert flaubert
fnet funnel gte ibert jina_embeddings_v3 layoutlm layoutlmv2 layoutlmv3 lilt longformer luke markuplm mobilebert
modernbert modernvbert molmo2_text moonshine moonshine_streaming mpnet mra neomme nomic_bert nystromformer perceiver
pop2piano speech-encoder-decoder speech_to_text speecht5 squeezebert tapas tipsv2_text_model ultrabert ultravbert
vibevoice yoso
"""
_SINCE_5_20 = """
bailing_hybrid beam flint kolibri1 minicpm_ocr mistral_large4 molmo2 molmo2_text moss_transcribe_diarize muse_spark
nemo_speechlm ultrabert ultravbert unlimited_ocr
"""

GENERATORS_5_22 = frozenset(_GENERATE.split())
"""Names in the mappings for causal, image-text-to-text, multimodal and sequence-to-sequence models: models/auto/
modeling_auto.py of 5.22.2."""
ARCHITECTURES_5_19 = (GENERATORS_5_22 | frozenset(_OTHERS.split())) - frozenset(_SINCE_5_20.split())
"""The same, and those for speech, masked language models, text encoders and sequence classification: modeling_auto.py
of 5.19.0."""
OF_FACTS = frozenset(["", "unknown", "minimax_m3", "deepseek_ref"])
"""Names that bedplate's facts have for models without a `model_type` of their own."""


REMOTE_CODE_HINT = "an engine that implements it, or GGUF weights; bedplate starts no code of a repository"


class OwnModels(NamedTuple):
    """The architectures that one version of an engine starts without code of the model's repository."""

    version: str
    names: frozenset[str]

    def explain(self, model: Model, version: str | None, name: str) -> str | None:
        """Why this version does not start the model; `None`: it does, or the list is of another version."""
        architecture = model.architecture
        if version != self.version or model.format != "safetensors":
            return None
        if architecture in self.names or architecture in OF_FACTS:
            return None
        return f"{name} has no {architecture}, so that it would need code of the model's repository"

    def refuse(self, engine: Engine, model: Model) -> Refusal | None:
        why = self.explain(model, engine.version, self.version)
        return engine.make_refusal("impossible", why, REMOTE_CODE_HINT) if why is not None else None
