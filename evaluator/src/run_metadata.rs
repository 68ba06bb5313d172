//! Metadata of a run in the results file, by lm-eval's keys.

use candlewick_text::tokenizer::SpecialToken;
use serde_json::{Map, Value as Json, json};
use sha2::{Digest, Sha256};

use crate::chat::ChatTemplateFormatter;
use crate::environment::{environment, git_hash, upper_git_hash};
use crate::output::sanitized;
use candlewick_inference::lm::Lm;

/// Metadata of a run, as the results file reports it.
pub struct RunMetadata<'a> {
    /// The model as it was named.
    pub model_name: &'a str,
    /// The branch, tag or commit, if one was named.
    pub revision: Option<&'a str>,
    /// lm-eval's `model_args`.
    pub model_args: Map<String, Json>,
    /// Context length in tokens.
    pub max_length: usize,
    /// The chat template that prompts were printed with.
    pub chat: Option<&'a ChatTemplateFormatter>,
    /// System instruction.
    pub system_instruction: Option<&'a str>,
    /// True if each few-shot example is a chat turn.
    pub fewshot_as_multiturn: bool,
    /// Options that are reported as they were given, by lm-eval's names.
    pub options: Map<String, Json>,
    /// Start time, in seconds since 1970.
    pub date: f64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// The version of lm-evaluation-harness whose results these are like.
const LM_EVAL: &str = "0.4.13";

/// Returns the metadata keys of a results file.
pub fn run_metadata(lm: &Lm, metadata: &RunMetadata) -> Map<String, Json> {
    let model = lm.engine().model();
    let n_parameters: usize = model.base_params().chain(model.adapter_params()).map(|param| param.numel()).sum();
    let mut config = Map::new();
    config.insert("model".into(), json!("candlewick"));
    config.insert("model_args".into(), json!(metadata.model_args));
    config.insert("model_num_parameters".into(), json!(n_parameters));
    config.insert("model_dtype".into(), json!(format!("torch.{}", long_name(lm.dtype().as_str()))));
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
        "pretty_env_info": environment(),
        "lm_eval_version": LM_EVAL,
        "date": metadata.date,
        "candlewick_version": env!("CARGO_PKG_VERSION"),
        "tokenizer_pad_token": token(tokenizer.pad()),
        "tokenizer_eos_token": token(tokenizer.eos()),
        "tokenizer_bos_token": token(tokenizer.bos()),
        "eot_token_id": tokenizer.eos().map(|token| token.id),
        "max_length": metadata.max_length,
        "model_source": "candlewick",
        "model_name": metadata.model_name,
        "model_name_sanitized": sanitized(metadata.model_name),
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

/// The commit that a folder of the Hub's cache is called by; empty for another folder, as lm-eval has it.
fn commit(lm: &Lm) -> String {
    let name = lm.folder().file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let is_commit = name.len() == 40 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_commit { name } else { String::new() }
}

/// Returns torch's name of a dtype.
fn long_name(dtype: &str) -> &str {
    match dtype {
        "bf16" => "bfloat16",
        "f16" => "float16",
        "f32" => "float32",
        other => other,
    }
}
