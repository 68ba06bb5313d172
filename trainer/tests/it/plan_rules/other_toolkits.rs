//! Keys and values of other toolkits.

use super::{BASE, refused, resolve};

/// Words of other toolkits that are no keys of a recipe.
pub(crate) const WORDS: &str = "
    dpo ipo kto orpo simpo grpo ppo rlhf reward_model online_dpo trl qlora 4bit 4-bit 8bit load_in_4bit load_in_8bit bnb gptq awq
    bnb_4bit_quant_type lora peft adapter dora use_dora modules_to_save trainable_token_indices neftune neftune_noise_alpha pissa
    prefix_tuning ia3 loraplus lora_plus lora_bias freeze unfreeze flash_attention flash-attention flash_attention_2 flash_attn sdpa
    xformers liger liger_kernel use_liger_kernel unsloth zero zero1 zero2 zero3 zero_offload offload nvme cpu_offload
    fsdp fsdp2 fsdp_config ddp accelerate vision multimodal images classification distillation kd muon adafactor lion adam8bit
    paged_adamw_8bit adamw_8bit galore ema swa gradient_checkpointing mixed_precision amp bf16 fp16 tf32 compile
    torch_compile mps rocm xpu tpu gguf quantization resume warmup cosine packing sample_packing multipack sequence_packing
    curriculum tools tool_calling chat_template system_prompt special_tokens add_tokens pad_token eos_token bos_token rope_scaling
    yarn long_context ring_attention s2_attention shift_attn speculative_decoding beam_search mtp lr learning_rate max_steps
    num_epochs batch_size save_safetensors push_to_hub comet trackio swanlab clearml neptune tensorboard streaming device_map
    trust_remote_code low_cpu_mem_usage use_cache ddp_find_unused_parameters dataloader_num_workers group_by_length";

#[test]
fn words_of_other_toolkits_get_their_key_or_a_replacement() {
    for word in WORDS.split_whitespace() {
        let message = resolve(BASE, &[&format!("{word}=true")]).err().unwrap_or_else(|| panic!("{word} is accepted"));
        let message = message.to_string();
        // The other lines with a name say where all keys are.
        let is_list = |line: &str| line.contains("-v lists the keys") || line.contains("`trainer schema`");
        let answers = ["not supported; use ", "= remove the key: ", "`"];
        let is_answer = |line: &str| !is_list(line) && answers.iter().any(|part| line.contains(part));
        let is_answered = message.lines().skip(1).any(is_answer);
        assert!(is_answered && !message.contains("did you mean"), "{word}: {message}");
    }
}

#[test]
fn values_of_other_toolkits_get_a_replacement() {
    for (argument, part) in [
        ("device=mps", "GPUs of Apple, AMD and Intel (mps, ROCm, XPU): not supported; use `device: cpu`, or"),
        ("device=xpu:0", "not supported; use `device: cpu`"),
        ("device=tpu", "not supported; use `device: cpu`"),
        ("device=rocm", "not supported; use `device: cpu`"),
        ("model.peft_config={use_dora: true}", "DoRA: not supported; use LoRA"),
        ("model.peft_config={modules_to_save: [lm_head]}", "not supported; use full fine-tuning"),
        ("model.peft_config={init_lora_weights: pissa}", "not supported; use LoRA, or rsLoRA"),
        ("model.peft_config={peft_type: IA3}", "not supported; use LoRA, or rsLoRA"),
        ("model.peft_config={bias: lora_only}", "not supported; use `bias: none`"),
        ("model.peft_config={bias: all}", "not supported; use `bias: none`"),
        ("beta=0.1", "not supported; use `type: sft` here, then TRL"),
        ("deepspeed.zero_optimization.offload_optimizer.device=nvme", "not supported; use `device: cpu`"),
        ("model.quantize_base=nf4", "not supported; use `model.quantize_base: fp8`"),
        ("ref_model={name_or_path: x}", "not supported; use `type: sft` here, then TRL"),
    ] {
        refused(&[argument], &[part]);
    }
}
