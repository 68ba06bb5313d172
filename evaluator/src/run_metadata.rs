//! Metadata of a run in `results_DATE.json`, under lm-eval's keys.

use candlewick_text::tokenizer::SpecialToken;
use serde_json::{Map, Value as Json, json};
use sha2::{Digest, Sha256};

use crate::chat::ChatTemplateFormatter;
use crate::environment::{git_hash, pretty_env_info, upper_git_hash};
use crate::output::sanitize_model_name;
use candlewick_inference::lm::Lm;

/// Metadata of a run, as the results file reports it.
pub struct RunMetadata<'a> {
    /// Model name or path, as given on the command line.
    pub model_name: &'a str,
    /// Branch, tag or commit, if one was given.
    pub revision: Option<&'a str>,
    /// lm-eval's `model_args`.
    pub model_args: Map<String, Json>,
    /// Context length in tokens.
    pub max_length: usize,
    /// Chat template that formatted the prompts, if any.
    pub chat: Option<&'a ChatTemplateFormatter>,
    /// System instruction, if any.
    pub system_instruction: Option<&'a str>,
    /// True if each few-shot example is a chat turn.
    pub fewshot_as_multiturn: bool,
    /// Other options as given, under lm-eval's names.
    pub options: Map<String, Json>,
    /// Start time in seconds since 1970 (Unix time).
    pub date: f64,
    /// Duration of the run in seconds.
    pub seconds: f64,
}

/// Version of lm-evaluation-harness whose results format is written.
const LM_EVAL_VERSION: &str = "0.4.13";

/// Returns the metadata entries of a results file.
pub fn run_metadata(lm: &Lm, metadata: &RunMetadata) -> Map<String, Json> {
    let model = lm.engine().model();
    let n_parameters: usize = model.base_params().chain(model.adapter_params()).map(|param| param.numel()).sum();
    let mut config = Map::new();
    config.insert("model".into(), json!("candlewick"));
    config.insert("model_args".into(), json!(metadata.model_args));
    config.insert("model_num_parameters".into(), json!(n_parameters));
    config.insert("model_dtype".into(), json!(format!("torch.{}", torch_dtype_name(lm.dtype().as_str()))));
    config.insert("model_revision".into(), json!(metadata.revision.unwrap_or("main")));
    config.insert("model_sha".into(), json!(commit(lm)));
    config.extend(metadata.options.clone());
    let token = |token: Option<&SpecialToken>| match token {
        Some(token) => json!([token.text, token.id.to_string()]),
        None => json!([null, "None"]),
    };
    let tokenizer = lm.tokenizer();
    let template = metadata.chat.map(|chat| chat.template().source());
    let run = json!({
        "config": config,
        "git_hash": git_hash(),
        "upper_git_hash": upper_git_hash(),
        "pretty_env_info": pretty_env_info(),
        "lm_eval_version": LM_EVAL_VERSION,
        "date": metadata.date,
        "candlewick_version": env!("CARGO_PKG_VERSION"),
        "tokenizer_pad_token": token(tokenizer.pad()),
        "tokenizer_eos_token": token(tokenizer.eos()),
        "tokenizer_bos_token": token(tokenizer.bos()),
        "eot_token_id": tokenizer.eos().map(|token| token.id),
        "max_length": metadata.max_length,
        "model_source": "candlewick",
        "model_name": metadata.model_name,
        "model_name_sanitized": sanitize_model_name(metadata.model_name),
        "system_instruction": metadata.system_instruction,
        "system_instruction_sha": metadata.system_instruction.map(sha256),
        "fewshot_as_multiturn": metadata.fewshot_as_multiturn,
        "chat_template": template,
        "chat_template_sha": template.map(sha256),
        "total_evaluation_time_seconds": metadata.seconds.to_string(),
    });
    run.as_object().cloned().unwrap_or_default()
}

fn sha256(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the commit hash in a Hub cache path, or an empty string for a local folder, as in lm-eval.
fn commit(lm: &Lm) -> String {
    let name = lm.folder().file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let is_commit = name.len() == 40 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_commit { name } else { String::new() }
}

/// Returns torch's name of a dtype, such as `bfloat16` for `bf16`.
fn torch_dtype_name(dtype: &str) -> &str {
    match dtype {
        "bf16" => "bfloat16",
        "f16" => "float16",
        "f32" => "float32",
        other => other,
    }
}
