//! `--model-args` of lm-eval: each key is converted to the option of the same meaning before the command line is
//! parsed.

use std::ffi::OsString;
use std::iter::Peekable;

use candlewick_runtime::terminal::print_note;
use candlewick_text::suggestion::did_you_mean;
use serde_json::Value as Json;

use super::key_values::key_values;

/// lm-eval's keys for its Hugging Face model, and the corresponding options.
const KEYS: [(&str, &str); 15] = [
    ("pretrained", "--model"),
    ("revision", "--revision"),
    ("peft", "--adapter"),
    ("dtype", "--dtype"),
    ("device", "--device"),
    ("batch_size", "--batch-size"),
    ("max_batch_size", "--max-batch-size"),
    ("max_length", "--max-length"),
    ("max_gen_toks", "--max-gen-toks"),
    ("add_bos_token", "--add-bos-token"),
    ("attn_implementation", "--attn-implementation"),
    ("think_end_token", "--think-end-token"),
    ("enable_thinking", "--enable-thinking"),
    ("chat_template_args", "--chat-template-args"),
    ("trust_remote_code", "--trust-remote-code"),
];

/// Keys without effect, which only cause a warning.
const HARMLESS: [&str; 6] = [
    "use_fast_tokenizer",
    "logits_cache",
    "low_cpu_mem_usage",
    "offload_folder",
    "max_memory_per_gpu",
    "max_cpu_memory",
];

/// Unsupported keys of lm-eval, each with an alternative.
const REFUSED: [(&str, &str); 14] = [
    ("tokenizer", "the tokenizer is read from the model's folder"),
    ("subfolder", "pass the subfolder itself as the model"),
    ("backend", "only decoder (causal) models are supported"),
    ("truncation", "long contexts are truncated from the left to --max-length"),
    ("prefix_token_id", "an empty context becomes the tokenizer's BOS token, else EOS"),
    ("softmax_dtype", "log-probabilities are always computed in float32"),
    ("mixed_precision_dtype", "use dtype"),
    ("parallelize", "start ranks with `launch`, and use --tensor-parallel-size or --pipeline-parallel-size"),
    ("tp_plan", "start ranks with `launch`, and use --tensor-parallel-size"),
    ("delta", "merge the delta weights into the model first, or use an adapter"),
    ("autogptq", "quantized models are not supported"),
    ("gptqmodel", "quantized models are not supported"),
    ("gguf_file", "GGUF files are not supported; use the Hugging Face folder"),
    ("load_in_8bit", "use dtype=bfloat16"),
];

/// Replaces `--model-args` of the subcommand `run` by the corresponding options. lm-eval's `--model hf` is removed if
/// `pretrained=MODEL` is given. The error names the unsupported key or value.
pub(super) fn expand_model_args(arguments: impl Iterator<Item = OsString>) -> Result<Vec<OsString>, String> {
    let mut arguments = arguments.peekable();
    let mut expanded: Vec<OsString> = Vec::new();
    let mut words = Vec::new();
    let mut is_run = false;
    while let Some(argument) = arguments.next() {
        is_run |= expanded.len() == 1 && argument == "run";
        match argument.to_str().filter(|_| is_run).and_then(value_of_option) {
            None => expanded.push(argument),
            Some(Some(value)) => words.push(value),
            Some(None) => words.extend(values(&mut arguments)),
        }
    }
    let options = options(&words)?;
    if let Some(at) = options.iter().position(|option| option == "--model") {
        without_backend(&mut expanded);
        check_backend(&expanded, options.get(at + 1).map_or("", String::as_str))?;
    }
    expanded.extend(options.into_iter().map(OsString::from));
    Ok(expanded)
}

/// Returns the value of `--model-args=VALUE`: `Some(None)` without a value, `None` for another argument.
fn value_of_option(argument: &str) -> Option<Option<String>> {
    let (name, value) = match argument.split_once('=') {
        Some((name, value)) => (name, Some(value.to_owned())),
        None => (argument, None),
    };
    ["--model-args", "--model_args", "-a"].contains(&name).then_some(value)
}

/// Returns the arguments up to the next option.
fn values(arguments: &mut Peekable<impl Iterator<Item = OsString>>) -> Vec<String> {
    let is_value = |argument: &OsString| !argument.to_string_lossy().starts_with('-');
    let mut values = Vec::new();
    while let Some(value) = arguments.next_if(is_value) {
        values.push(value.to_string_lossy().into_owned());
    }
    values
}

fn without_backend(arguments: &mut Vec<OsString>) {
    let is_backend = |value: &str| ["hf", "hf-auto", "huggingface"].contains(&value);
    let at = arguments.iter().position(|argument| argument == "--model" || argument == "-M");
    if let Some(at) = at
        && arguments.get(at + 1).and_then(|value| value.to_str()).is_some_and(is_backend)
    {
        arguments.drain(at..at + 2);
    }
    arguments
        .retain(|argument| !argument.to_str().and_then(|word| word.strip_prefix("--model=")).is_some_and(is_backend));
}

/// Returns an error if `--model` names another lm-eval backend than `hf` together with `pretrained=MODEL`.
fn check_backend(arguments: &[OsString], model: &str) -> Result<(), String> {
    let mut words = arguments.iter().filter_map(|argument| argument.to_str());
    let named = words.find_map(|word| match word {
        "--model" | "-M" => Some(None),
        word => word.strip_prefix("--model=").map(Some),
    });
    let Some(glued) = named else { return Ok(()) };
    let backend = glued.or_else(|| words.next()).unwrap_or_default();
    Err(format!(
        "--model {backend}: with --model-args pretrained={model} it names a backend of lm-eval, and only `hf` is \
         supported; remove --model {backend}"
    ))
}

fn options(words: &[String]) -> Result<Vec<String>, String> {
    let mut options = Vec::new();
    for (key, value) in key_values("--model-args", words)? {
        if let Some((_, option)) = KEYS.iter().find(|(known, _)| *known == key) {
            match (key.as_str(), value) {
                (_, Json::Null) | ("trust_remote_code", Json::Bool(false)) => {}
                ("trust_remote_code", _) => options.push((*option).to_owned()),
                (_, Json::String(text)) => options.extend([(*option).to_owned(), text]),
                (_, value) => options.extend([(*option).to_owned(), value.to_string()]),
            }
        } else if HARMLESS.contains(&key.as_str()) {
            print_note(&format!("warning: --model-args {key} has no effect here"));
        } else if let Some((_, instead)) = REFUSED.iter().find(|(refused, _)| *refused == key) {
            return Err(format!("--model-args {key}: {instead}"));
        } else {
            let known = KEYS.map(|(key, _)| key);
            return Err(format!(
                "--model-args: unknown key `{key}`{}; known are {}",
                did_you_mean(&key, known),
                known.join(", ")
            ));
        }
    }
    Ok(options)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn spread_of(words: &[&str]) -> Result<Vec<String>, String> {
        let expanded = expand_model_args(words.iter().map(OsString::from))?;
        Ok(expanded.into_iter().map(|word| word.into_string().unwrap()).collect())
    }

    #[track_caller]
    fn check(words: &[&str], want: &[&str]) {
        assert_eq!(spread_of(&[&["evaluator", "run"], words].concat()).unwrap()[2..], *want);
    }

    #[test]
    fn model_args_are_options() {
        check(
            &["--model", "hf", "--model_args", "pretrained=a/b,dtype=float32", "max_length=64", "--tasks", "x"],
            &["--tasks", "x", "--model", "a/b", "--dtype", "float32", "--max-length", "64"],
        );
        check(&["-M", "hf", "-a", "pretrained=a", "-t", "x"], &["-t", "x", "--model", "a"]);
        check(&["--model=hf", "--model-args=pretrained=a"], &["--model", "a"]);
        check(&["--model", "a", "-a", "trust_remote_code=True,peft=None"], &["--model", "a", "--trust-remote-code"]);
        check(
            &["-a", r#"{"pretrained": "a", "enable_thinking": false, "chat_template_args": {"b": 1}}"#],
            &["--model", "a", "--enable-thinking", "false", "--chat-template-args", "{\"b\":1}"],
        );
        assert_eq!(spread_of(&["evaluator", "show", "-a", "x"]).unwrap(), ["evaluator", "show", "-a", "x"]);
    }

    #[test]
    fn another_backend_than_hf_is_refused() {
        for words in [&["--model", "vllm"][..], &["--model=vllm"], &["-t", "x", "-M", "vllm"]] {
            let error = spread_of(&[&["evaluator", "run"], words, &["-a", "pretrained=a/b"]].concat()).unwrap_err();
            assert!(error.starts_with("--model vllm: with --model-args pretrained=a/b"), "{error}");
            assert!(error.ends_with("only `hf` is supported; remove --model vllm"), "{error}");
        }
    }

    #[test]
    fn model_args_without_an_option_are_refused() {
        let refused = |word: &str| spread_of(&["evaluator", "run", "-a", word]).unwrap_err();
        assert!(refused("pretrain=a").contains("unknown key `pretrain`; did you mean `pretrained`?"));
        assert!(refused("parallelize=True").contains("--tensor-parallel-size"));
        assert!(refused("a").contains("not key=value"));
    }
}
