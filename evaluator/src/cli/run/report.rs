//! The results of `evaluator run`: metadata, files and tables.

use std::time::Instant;

use anyhow::{Result, anyhow};
use candlewick_inference::lm::Lm;
use candlewick_runtime::run_id::RunId;
use candlewick_runtime::terminal::{print_line, print_note};
use serde_json::{Map, Value as Json, json};

use super::RunArgs;
use crate::chat::ChatTemplateFormatter;
use crate::cli::key_values::key_values;
use crate::evaluation::Evaluation;
use crate::output::ResultsFolder;
use crate::results::{
    HtmlReport, Results, ResultsHeader, TaskRun, groups_table, header_line, results_table, skipped_counts,
};
use crate::run_metadata::{RunMetadata, run_metadata};
use crate::task::ChatFormatter;

impl RunArgs {
    /// Returns the metadata of the results: options, seeds, versions and times.
    pub(super) fn metadata(
        &self,
        lm: &Lm,
        chat: Option<&ChatTemplateFormatter>,
        max_length: usize,
        (id, began): (RunId, Instant),
    ) -> Result<Map<String, Json>> {
        let options = self.prompts.options(chat.map(|chat| chat as &dyn ChatFormatter))?;
        let [python, numpy, torch, fewshot] = self.seeds().values;
        let reported = json!({
            "batch_size": self.request_args.batch_size(),
            "batch_sizes": [],
            "device": format!("{:?}", lm.engine().device().location()),
            "use_cache": self.use_cache,
            "limit": self.limit,
            "bootstrap_iters": self.bootstrap_iters,
            "gen_kwargs": Some(options.gen_kwargs).filter(|kwargs| !kwargs.is_empty()),
            "random_seed": python,
            "numpy_seed": numpy,
            "torch_seed": torch,
            "fewshot_seed": fewshot,
        });
        Ok(run_metadata(
            lm,
            &RunMetadata {
                model_name: &self.model.model,
                revision: self.model.compute.revision.as_deref(),
                model_args: self.model_args(),
                max_length,
                chat,
                system_instruction: options.system_instruction.as_deref(),
                fewshot_as_multiturn: options.fewshot_as_multiturn,
                options: reported.as_object().cloned().unwrap_or_default(),
                date: id.seconds(),
                seconds: began.elapsed().as_secs_f64(),
            },
        ))
    }

    /// Writes the results to the output folder, and prints them.
    pub(super) fn report(
        &self,
        results: &Results,
        runs: &[TaskRun],
        evaluation: &Evaluation,
        output: Option<&ResultsFolder>,
    ) -> Result<()> {
        if let Some(output) = output {
            let path = output.write_results(results)?;
            print_note(&path.display().to_string());
            let sample_bytes = self.report_samples << 20;
            let page = HtmlReport { results, runs, command: &command(), sample_bytes }.html()?;
            print_note(&output.write_report(&page)?.display().to_string());
        }
        if self.json {
            return print_line(&serde_json::to_string_pretty(results)?);
        }
        if self.show_config {
            print_line(&serde_json::to_string_pretty(results)?)?;
        }
        let tables = format!("{}\n{}", results_table(results), groups_table(results));
        let notes: Vec<String> = std::iter::once(skipped_counts(results)).chain(evaluation.fewshot_notes()).collect();
        print_line(&format!("{}\n{}\n\n{}", header_line(&self.header()?), tables.trim_end(), notes.join("\n")))
    }

    /// Returns the header line above the table.
    fn header(&self) -> Result<ResultsHeader> {
        let gen_kwargs = key_values("--gen-kwargs", &self.prompts.gen_kwargs);
        Ok(ResultsHeader {
            model_args: self.given_model_args(),
            gen_kwargs: gen_kwargs.map_err(|problem| anyhow!("failed to print the results: {problem}"))?,
            limit: self.limit.map(|limit| limit.to_string()),
            num_fewshot: self.prompts.num_fewshot,
            batch_size: self.request_args.batch_size(),
        })
    }

    /// Returns the model options under lm-eval's keys of `model_args`.
    fn model_args(&self) -> Map<String, Json> {
        let all = json!({
            "pretrained": self.model.model,
            "peft": self.model.compute.adapter,
            "quantization": self.model.compute.quantization.name(),
            "think_end_token": self.request_args.think_end_token,
            "enable_thinking": self.prompts.enable_thinking,
            "chat_template_args": self.prompts.chat_template_args,
        });
        let all = all.as_object().cloned().unwrap_or_default();
        let is_given = |value: &Json| !value.is_null() && value.as_array().is_none_or(|words| !words.is_empty());
        all.into_iter().filter(|(key, value)| key == "peft" || is_given(value)).collect()
    }

    /// Returns the given keys of `model_args` and other model options, for the header line above the table.
    fn given_model_args(&self) -> Map<String, Json> {
        let more = json!({
            "revision": self.model.compute.revision,
            "dtype": self.model.compute.dtype.torch_name(),
            "max_length": self.request_args.max_length,
            "add_bos_token": self.request_args.add_bos_token,
        });
        let more = more.as_object().cloned().unwrap_or_default();
        self.model_args().into_iter().chain(more).filter(|(_, value)| !value.is_null()).collect()
    }
}

/// Returns the command line, quoted for a shell.
fn command() -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=+,./:@%".contains(c);
    let quoted = |word: String| match !word.is_empty() && word.chars().all(is_plain) {
        true => word,
        false => format!("'{}'", word.replace('\'', "'\\''")),
    };
    let words = std::env::args_os().skip(1).map(|word| quoted(word.to_string_lossy().into_owned()));
    std::iter::once("evaluator".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}
