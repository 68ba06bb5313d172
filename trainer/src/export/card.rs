//! Model card of an export: README.md of a Hub repository.

use serde_json::Value;

use super::{ExportFormat, ExportSource};
use crate::resolve::is_path;

/// Returns the model card. Facts about the training come from the run's `run.json`, if it is known.
pub fn model_card(name: &str, source: &ExportSource, formats: &[ExportFormat]) -> String {
    let has_gguf = formats.iter().any(|format| format.gguf().is_some());
    let has_safetensors = formats.contains(&ExportFormat::Safetensors);
    // A path on this machine says nothing to others.
    let base = source.base_model.as_deref().filter(|base| !is_path(base));
    let mut card = "---\n".to_owned();
    if has_safetensors {
        card += "library_name: transformers\n";
    }
    card += "pipeline_tag: text-generation\n";
    if let Some(base) = base {
        card += &format!("base_model: {base}\n");
    }
    card += "tags:\n- candlewick\n";
    if has_gguf {
        card += "- gguf\n";
    }
    card += &format!("---\n\n# {name}\n\n");
    let architecture = source.model.config().family().architecture();
    let n_params: usize = source.model.params().map(|param| param.numel()).sum();
    card += &format!("{architecture} with {} parameters", grouped(n_params));
    card += &match (base, source.is_adapted) {
        (Some(base), true) => format!(", {base} with a LoRA adapter merged in"),
        (Some(base), false) => format!(", trained from {base}"),
        (None, true) => ", with a LoRA adapter merged in".to_owned(),
        (None, false) => String::new(),
    };
    card += ".\n\n";
    card += &training(source);
    card += &usage(name, has_safetensors, has_gguf);
    card
}

/// Returns a table of the training's settings; empty if the run is unknown.
fn training(source: &ExportSource) -> String {
    let Some(run) = &source.run else { return String::new() };
    let facts = [
        ("optimizer steps", "/metrics/step/iter"),
        ("learning rate", "/plan/optimizer/learning_rate"),
        ("maximum sequence length", "/plan/data/max_length"),
        ("training loss", "/metrics/step/loss"),
        ("evaluation loss", "/metrics/eval/loss~1eval"),
    ];
    let rows: String = facts
        .iter()
        .filter_map(|(fact, pointer)| run.get(pointer).map(|value| format!("| {fact} | {} |\n", shown(value))))
        .collect();
    if rows.is_empty() { rows } else { format!("## Training\n\n| setting | value |\n|---|---|\n{rows}\n") }
}

fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn usage(name: &str, has_safetensors: bool, has_gguf: bool) -> String {
    let mut text = "## Use\n\n".to_owned();
    if has_safetensors {
        text += &format!(
            "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\ntokenizer = \
             AutoTokenizer.from_pretrained(\"{name}\")\nmodel = AutoModelForCausalLM.from_pretrained(\"{name}\", \
             dtype=\"auto\")\n```\n"
        );
    }
    if has_gguf {
        text += &format!("```sh\nllama-cli -hf {name}\n```\n");
    }
    text
}

/// Writes a number with commas: 134,515,008.
fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| std::str::from_utf8(group).unwrap_or("")).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped_by_three() {
        for (n, want) in [(0, "0"), (999, "999"), (1000, "1,000"), (134_515_008, "134,515,008")] {
            assert_eq!(grouped(n), want);
        }
    }
}
