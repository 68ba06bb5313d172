//! `evaluator run`: evaluates a model on tasks, with lm-eval's options.

mod report;
mod stop;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_text_file};
use candlewick_text::hub::Hub;
use clap::Args;

use super::limit::Limit;
use super::prefetch::lock_context;
use super::request_args::{RequestArgs, progress_reporter};
use super::seeds::{Seeds, seeds};
use super::tasks::{PromptArgs, TaskArgs};
use super::unsupported_lm_eval_args::UnsupportedLmEvalArgs;
use crate::chat::ChatTemplateFormatter;
use crate::evaluation::Evaluation;
use crate::output::{ResultsFolder, sanitize_task_name};
use crate::results::TaskRun;
use crate::task::{
    ChatFormatter, DataOverrides, OutputType, PromptOptions, Task, TaskSelection, UnsafeCodeOptions, UnsafeCodePolicy,
};
use candlewick_inference::answer::{EngineBackend, RequestsInterrupted};
use candlewick_inference::command::{ModelOptions, ParallelArgs};
use candlewick_inference::lm::Lm;
use candlewick_inference::ranks::{EvalRanks, run_on_ranks};
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::progress::{ProgressDisplay, set_progress_display};
use candlewick_runtime::rank_env::rank_env;
use candlewick_runtime::run_id::RunId;
use candlewick_runtime::terminal::print_note;
use stop::StopSignalWatch;

#[derive(Debug, Args)]
pub(super) struct RunArgs {
    #[command(flatten)]
    model: ModelOptions,
    /// Comma-separated tasks, groups, tags, patterns such as mmlu_* and YAML files
    #[arg(long, short, required = true, value_delimiter = ',', num_args = 1..)]
    tasks: Vec<String>,
    /// Model options in lm-eval's form: pretrained=NAME,dtype=bfloat16,peft=FOLDER,max_length=2048, ... or a JSON
    /// object
    #[arg(long, short = 'a', alias = "model_args", value_name = "KEY=VALUE", num_args = 1..)]
    model_args: Vec<String>,
    #[command(flatten)]
    parallel: ParallelArgs,
    #[command(flatten)]
    request_args: RequestArgs,
    #[command(flatten)]
    source: TaskArgs,
    #[command(flatten)]
    prompts: PromptArgs,
    /// Number of documents of each task, or a fraction if below 1
    #[arg(long, short = 'L', value_name = "N", allow_negative_numbers = true)]
    limit: Option<Limit>,
    /// Indices of the evaluated documents, as JSON or a JSON file: {"arc_easy": [0, 5]}
    #[arg(long, short = 'E', value_name = "JSON", conflicts_with = "limit")]
    samples: Option<String>,
    /// Generate responses without scoring; implies --log-samples
    #[arg(long, short = 'x', alias = "predict_only", requires = "output_path")]
    predict_only: bool,
    /// Allow tasks that run model-written code
    #[arg(long, alias = "confirm_run_unsafe_code")]
    confirm_run_unsafe_code: bool,
    /// Run model-written code even if this machine cannot confine its writes to its own folder
    #[arg(long, alias = "allow_unconfined_code", requires = "confirm_run_unsafe_code")]
    allow_unconfined_code: bool,
    /// Output folder of results_*.json, the HTML report, samples and the response cache. An interrupted command
    /// continues from it
    #[arg(long, short, alias = "output_path", value_name = "FOLDER")]
    output_path: Option<PathBuf>,
    /// Also write a record of each document to samples_*.jsonl
    #[arg(long, short = 's', alias = "log_samples", requires = "output_path")]
    log_samples: bool,
    /// Folder of the response cache [default: below --output-path]
    #[arg(long, short = 'c', alias = "use_cache", value_name = "FOLDER")]
    use_cache: Option<PathBuf>,
    /// Seeds of Python, NumPy, torch and few-shot sampling: one for all, or four separated by commas. None picks a
    /// random seed. The torch seed also seeds generation [default: 0,1234,1234,1234]
    #[arg(long, value_parser = seeds, conflicts_with = "fewshot_seed")]
    seed: Option<Seeds>,
    /// Size limit of the samples in the HTML report, in MiB; 0 omits them
    #[arg(long, alias = "report_samples", value_name = "MIB", default_value_t = 16, requires = "output_path")]
    report_samples: usize,
    /// Number of bootstrap resamples for standard errors
    #[arg(long, alias = "bootstrap_iters", value_name = "N", default_value_t = 100_000)]
    bootstrap_iters: usize,
    /// Print the results as JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Print the results and the tasks' configurations as JSON before the table
    #[arg(long, alias = "show_config", conflicts_with = "json")]
    show_config: bool,
    /// Print the prompt of the first document of each task to stderr
    #[arg(long, short = 'w', alias = "write_out")]
    write_out: bool,
    /// Log level on stderr: critical, error, warning, info or debug
    #[arg(long, short, value_name = "LEVEL", default_value = "warning", value_parser = level)]
    verbosity: tracing::Level,
    /// Lock file of `evaluator prefetch` or `trainer prefetch`: use only its commits, from the cache
    #[arg(long, value_name = "FILE")]
    lock: Option<PathBuf>,
    #[command(flatten)]
    unsupported_lm_eval_args: UnsupportedLmEvalArgs,
}

/// lm-eval's warning, verbatim.
const LIMIT_WARNING: &str = "--limit SHOULD ONLY BE USED FOR TESTING. REAL METRICS SHOULD NOT BE COMPUTED USING LIMIT.";

fn level(text: &str) -> Result<tracing::Level, String> {
    match text.to_lowercase().as_str() {
        "critical" | "error" => Ok(tracing::Level::ERROR),
        "warning" | "warn" => Ok(tracing::Level::WARN),
        "info" => Ok(tracing::Level::INFO),
        "debug" => Ok(tracing::Level::DEBUG),
        _ => Err("expected critical, error, warning, info or debug".into()),
    }
}

/// Evaluates the model. Returns [`ExitCode::Preempted`] if a signal stopped the computation of the responses.
pub(super) fn run(args: &RunArgs, hub: &Hub) -> Result<ExitCode> {
    args.unsupported_lm_eval_args.check()?;
    if args.is_quiet() {
        set_progress_display(ProgressDisplay::Hidden);
    }
    run_on_ranks(&rank_env()?, args.parallel.config(), args.model.compute.device, |ranks, device| {
        let (id, began) = (RunId::agree(&ranks.process, Ok(RunId::now()))?, Instant::now());
        let selection = args.select()?;
        let paths = args.prompts.data_overrides(&selection.tasks)?;
        let mut tasks = args.open(hub, ranks, &selection, &paths)?;
        args.check_thinking(&tasks)?;
        if args.predict_only {
            tasks = tasks.into_iter().map(Task::predict_only).collect();
        }
        ranks.process.on_first_rank(|| args.check_sandbox(&tasks))?;
        let lm = args.model.load_on(hub, ranks, device)?;
        let chat = args.chat(&lm, id)?;
        let options = args.options(chat.as_ref().map(|chat| chat as &dyn ChatFormatter), &tasks, id)?;
        let evaluation = ranks.process.keep_alive().during(|| Evaluation::new(tasks, selection.groups, options))?;
        if ranks.process.is_first() {
            args.print_notes(&evaluation);
        }
        let output = args.output_path.as_ref().map(|path| ResultsFolder::new(path, &args.model.model, id.file_stamp()));
        let log = args.use_cache.clone().or(output.as_ref().map(ResultsFolder::response_cache_folder));
        // Without a cache there is nothing to keep, and a signal ends the process at once.
        let stop = log.as_deref().map(StopSignalWatch::watch).transpose()?;
        let settings = args.request_args.settings(args.seeds().resolve(id.run).0, log.clone());
        let answers = EngineBackend::new(&lm, settings, ranks.inference_group())?;
        let max_length = answers.max_length();
        let mut answers = if args.is_quiet() { answers } else { answers.with_progress(progress_reporter(ranks)) };
        if let Some(stop) = &stop {
            answers = answers.with_stop(|| stop.is_requested());
        }
        let answered = match (evaluation.run_requests(&mut answers), &stop) {
            (Err(error), Some(stop)) if error.is::<RequestsInterrupted>() => return Ok(stop.finish(ranks)),
            (answered, _) => answered?,
        };
        if let Some(stop) = &stop {
            stop.end_at_once();
        }
        let report = || {
            let samples = output.as_ref().filter(|_| args.log_samples || args.predict_only);
            let write = |run: &TaskRun| match samples {
                Some(output) => output.write_samples(&run.config.task, &run.scores.samples).map(drop),
                None => Ok(()),
            };
            let runs = evaluation.score(&answered, args.bootstrap_iters, write)?;
            let mut results = evaluation.results(&runs, &answered)?;
            results.run = args.metadata(&lm, chat.as_ref(), max_length, (id, began))?;
            args.report(&results, &runs, &evaluation, output.as_ref())
        };
        ranks.process.on_first_rank(report)?;
        Ok(ExitCode::Ok)
    })
}

impl RunArgs {
    /// Returns a Hub that uses only the commits of `--lock`, if it is given; else `hub`.
    pub(super) fn hub(&self, hub: Hub) -> Result<Hub> {
        let Some(lock) = &self.lock else { return Ok(hub) };
        let locked = lock_context(lock).locked_hub(hub.settings().clone());
        locked.map_err(|error| anyhow!("failed to {error}").context(ExitCode::Usage))
    }

    /// Returns the log level of stderr.
    pub(super) fn level(&self) -> tracing::Level {
        self.verbosity
    }

    /// Returns true if only errors are logged.
    fn is_quiet(&self) -> bool {
        self.verbosity == tracing::Level::ERROR
    }

    /// Prints the tasks' data files, warnings about options without effect, and the first prompts with `--write-out`.
    fn print_notes(&self, evaluation: &Evaluation) {
        if !self.is_quiet() {
            evaluation.data_descriptions().for_each(|line| print_note(&line));
        }
        if self.limit.is_some() {
            tracing::warn!("{LIMIT_WARNING}");
        }
        let said = self.unsupported_lm_eval_args.warnings().into_iter().map(str::to_owned);
        said.chain(evaluation.ignored_kwargs_warnings()).for_each(|warning| tracing::warn!("{warning}"));
        if self.prompts.enable_thinking == Some(true) && self.request_args.think_end_token.is_none() {
            tracing::warn!("--enable-thinking without --think-end-token: the response includes the thinking");
        }
        if self.seeds().is_fewshot_default {
            tracing::warn!("--seed: with three seeds the few-shot seed is 1234");
        }
        if self.write_out {
            evaluation.first_prompts().for_each(|text| print_note(&text));
        }
    }

    /// Returns an error if `--enable-thinking` is set for a task that scores given continuations.
    fn check_thinking(&self, tasks: &[Task]) -> Result<()> {
        let is_scored = |task: &&Task| task.config().output_type != OutputType::GenerateUntil;
        let scored = tasks.iter().find(is_scored).filter(|_| self.prompts.enable_thinking == Some(true));
        ensure!(
            scored.is_none(),
            anyhow!(
                "failed to start: --enable-thinking needs tasks that generate, but {} scores given texts",
                scored.map_or("", |task| &task.config().task)
            )
            .context(ExitCode::Usage)
        );
        Ok(())
    }

    fn unsafe_code_policy(&self) -> UnsafeCodePolicy {
        let Self { confirm_run_unsafe_code, allow_unconfined_code, .. } = *self;
        UnsafeCodeOptions { confirm_run_unsafe_code, allow_unconfined_code }.into()
    }

    /// Returns an error if this machine cannot run the programs of a task.
    fn check_sandbox(&self, tasks: &[Task]) -> Result<()> {
        Ok(tasks.iter().try_for_each(|task| task.config().check_sandbox(self.unsafe_code_policy()))?)
    }

    fn select(&self) -> Result<TaskSelection> {
        let selection = self.source.registry()?.select(&self.tasks.join(","))?;
        for task in &selection.tasks {
            task.check_unsafe_code(self.unsafe_code_policy())?;
        }
        refuse_equal_file_names(&selection)?;
        Ok(selection)
    }

    /// Loads the documents of all tasks. One rank per node downloads first.
    fn open(
        &self,
        hub: &Hub,
        ranks: &EvalRanks,
        selection: &TaskSelection,
        paths: &DataOverrides,
    ) -> Result<Vec<Task>> {
        let PromptArgs { num_fewshot, compat, .. } = self.prompts;
        let options = PromptOptions { num_fewshot, compat: compat.is_some(), ..PromptOptions::default() };
        let open = |config| Ok(Task::open(hub, config, paths, &options)?);
        ranks.process.one_rank_per_node_first(|| selection.tasks.iter().cloned().map(open).collect())
    }

    fn chat(&self, lm: &Lm, id: RunId) -> Result<Option<ChatTemplateFormatter>> {
        if self.prompts.apply_chat_template.is_none() {
            return Ok(None);
        }
        let template = self.prompts.template(lm.tokenizer())?;
        let template = template.ok_or_else(|| {
            let advice = "name a built-in one, such as --apply-chat-template chatml";
            anyhow!("failed to apply a chat template: the model has none; {advice}").context(ExitCode::Usage)
        })?;
        Ok(Some(ChatTemplateFormatter::new(template.with_clock(id.clock()))))
    }

    /// Returns the prompt options of each task.
    fn options<'a>(
        &'a self,
        chat: Option<&'a dyn ChatFormatter>,
        tasks: &[Task],
        id: RunId,
    ) -> Result<Vec<PromptOptions<'a>>> {
        let mut samples = self.samples.as_deref().map(read_samples).transpose()?.unwrap_or_default();
        let fewshot_seed = self.seeds().resolve(id.run).1;
        let unsafe_code = self.unsafe_code_policy();
        let limit = self.limit.map(Limit::value);
        let all = PromptOptions { fewshot_seed, limit, unsafe_code, ..self.prompts.options(chat)? };
        let of_task = |task: &Task| PromptOptions { samples: samples.remove(&task.config().task), ..all.clone() };
        let options = tasks.iter().map(of_task).collect();
        match samples.keys().next() {
            None => Ok(options),
            Some(unknown) => {
                let error = anyhow!("failed to read --samples: {unknown} is not one of the selected tasks");
                Err(error.context(ExitCode::Usage))
            }
        }
    }

    fn seeds(&self) -> Seeds {
        self.seed.unwrap_or(Seeds::lm_eval_defaults(self.prompts.fewshot_seed))
    }
}

/// Returns an error if two tasks would write their samples to the same file.
fn refuse_equal_file_names(selection: &TaskSelection) -> Result<()> {
    let mut names = BTreeMap::new();
    for task in selection.tasks.iter().map(|task| &task.task) {
        let other = names.insert(sanitize_task_name(task), task).filter(|other| *other != task);
        ensure!(
            other.is_none(),
            anyhow!(
                "failed to start: the tasks {:?} and {task:?} have the same file name; rename one",
                other.map_or("", String::as_str)
            )
            .context(ExitCode::Usage)
        );
    }
    Ok(())
}

/// Reads `{task: [indices]}`, given as JSON or as the path of a JSON file.
fn read_samples(text: &str) -> Result<std::collections::HashMap<String, Vec<usize>>> {
    let json = match text.trim_start().starts_with('{') {
        true => text.to_owned(),
        false => {
            let read = read_regular_text_file(Path::new(text), MAX_CONFIG_FILE_BYTES);
            read.with_context(|| format!("failed to read --samples {text}")).context(ExitCode::Usage)?
        }
    };
    let samples = serde_json::from_str(&json);
    samples.map_err(|error| {
        anyhow!("failed to read --samples: {error}; write {{\"task\": [0, 5]}}").context(ExitCode::Usage)
    })
}
