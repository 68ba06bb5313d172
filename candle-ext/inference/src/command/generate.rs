//! The command `generate`: replies to prompts and conversations.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use candlewick_comm::rank_env::RankEnv;
use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_text_or_stdin};
use candlewick_text::hub::Hub;
use candlewick_text::template::Clock;
use clap::{ArgGroup, Args};
use serde::{Deserialize, Serialize};

use super::model::{ComputeOptions, TemplateOptions};
use super::parallel::ParallelArgs;
use super::sampling::SamplingOptions;
use crate::generate::{FinishReason, GenerateOptions};
use crate::lm::{GeneratedText, Lm, warn_of_unrendered_parts};
use crate::messages::conversations;
use crate::parallel_config::InferenceGroup;
use crate::ranks::{EvalRanks, run_on_ranks};
use candlewick_runtime::exit::{ExitCode, classify};
use candlewick_runtime::process_group::ProcessGroup;
use candlewick_runtime::run_id::RunId;
use candlewick_runtime::terminal::{print_generated, print_note};

/// Options of `generate`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("input").required(true))]
pub struct GenerateArgs {
    #[command(flatten)]
    compute: ComputeOptions,
    #[command(flatten)]
    parallel: ParallelArgs,
    /// A prompt; repeat it for several; - reads one from stdin
    #[arg(long, group = "input")]
    prompt: Vec<String>,
    /// System message of each prompt or conversation
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Conversations: a file, or - for stdin. A JSON list of messages, an object with `messages` and optionally
    /// `tools`, or JSON lines of either
    #[arg(long, value_name = "FILE", group = "input", conflicts_with = "raw")]
    messages: Option<PathBuf>,
    /// Complete the prompt without a chat template
    #[arg(long)]
    raw: bool,
    #[command(flatten)]
    template: TemplateOptions,
    #[command(flatten)]
    sampling: SamplingOptions,
    /// Print prefill and decode times as JSON to stderr, without model loading
    #[arg(long)]
    pub timings: bool,
}

/// Default number of new tokens.
const MAX_NEW_TOKENS: usize = 64;

/// A prompt of the command line.
enum GenerationPrompt {
    /// Text to complete, with `--raw`.
    Text(String),
    /// Conversation to reply to.
    Chat(Conversation),
}

/// The texts that rank 0 reads for all ranks.
#[derive(Serialize, Deserialize)]
struct InputTexts {
    prompts: Vec<String>,
    messages: Option<String>,
}

/// Generates replies to prompts and conversations with `model`, a path or Hub id, and prints them to stdout.
///
/// `env` has the ranks that share the model. The replicas take turns in the order of the prompts, and rank 0 prints.
pub fn generate(model: &str, args: &GenerateArgs, env: &RankEnv, hub: &Hub) -> Result<()> {
    run_on_ranks(env, args.parallel.config(), args.compute.device, |ranks, device| {
        let EvalRanks { process, .. } = ranks;
        let clock = RunId::agree(process, Ok(RunId::now()))?.clock();
        let texts = process.broadcast_from_first(|| Ok(serde_json::to_vec(&args.read_texts()?)?))?;
        let prompts = process.all_ok(args.prompts(&serde_json::from_slice(&texts)?))?;
        let lm = args.compute.load_on(model, hub, ranks, device)?;
        let (lm, options) = process.all_ok(args.prepare(lm, clock))?;
        let group = ranks.inference_group();
        for round in prompts.chunks(group.n_independent_replicas()) {
            if process.is_first() {
                round.iter().for_each(|prompt| prompt.warn_of_unrendered_parts(&lm));
            }
            let own = round.get(group.replica_index()).map(|prompt| prompt.answer(&lm, &options, &group));
            let (answers, done) = gather(process, &group, own)?;
            if process.is_first() {
                answers.iter().try_for_each(|(i, said)| args.show(prompts.len(), round[*i].last(), said))?;
            }
            process.all_ok(done)?;
        }
        Ok(())
    })
}

/// Gathers the answers of the replicas, each with its index among the prompts of a round. Returns them with this rank's
/// own error. Collective: all ranks must call it.
fn gather(
    process: &ProcessGroup,
    group: &InferenceGroup,
    own: Option<Result<GeneratedText>>,
) -> Result<(BTreeMap<usize, GeneratedText>, Result<()>)> {
    let (own, done) = match own {
        // All ranks of the replica have this error. After others, they may wait for this rank, so it leaves at once.
        Some(Err(error)) if classify(&error) == ExitCode::Data => (None, Err(error)),
        own => (own.transpose()?, Ok(())),
    };
    let own = own.filter(|_| group.reports).map(|answer| (group.replica_index(), answer));
    let all = process.exchange(Ok(serde_json::to_vec(&own)?))?;
    let all = all.iter().map(|bytes| Ok(serde_json::from_slice::<Option<(usize, GeneratedText)>>(bytes)?));
    Ok((all.filter_map(Result::transpose).collect::<Result<_>>()?, done))
}

impl GenerationPrompt {
    fn answer(&self, lm: &Lm, options: &GenerateOptions, group: &InferenceGroup) -> Result<GeneratedText> {
        let mut on_text = |_: &str| {
            group.step();
            Ok(ControlFlow::Continue(()))
        };
        group.together(|| match self {
            Self::Text(text) => lm.complete(text, options, &mut on_text),
            Self::Chat(chat) => lm.chat(chat, options, &mut on_text),
        })
    }

    /// Returns the prompt's text, or that of the last message.
    fn last(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Chat(chat) => chat.messages.last().and_then(Message::text).unwrap_or_default(),
        }
    }

    /// Warns if the chat template does not render the whole conversation.
    fn warn_of_unrendered_parts(&self, lm: &Lm) {
        if let (Self::Chat(chat), Some(template)) = (self, lm.template()) {
            warn_of_unrendered_parts(template, chat);
        }
    }
}

impl GenerateArgs {
    /// Reads prompts from stdin, and the file of conversations.
    fn read_texts(&self) -> Result<InputTexts> {
        let prompts = self.prompt.iter().map(|prompt| text_or_stdin(prompt)).collect::<Result<_>>()?;
        Ok(InputTexts { prompts, messages: self.messages.as_deref().map(read).transpose()? })
    }

    fn prompts(&self, InputTexts { prompts, messages }: &InputTexts) -> Result<Vec<GenerationPrompt>> {
        if self.raw {
            return Ok(prompts.iter().cloned().map(GenerationPrompt::Text).collect());
        }
        Ok(self.chats(prompts, messages.as_deref())?.into_iter().map(GenerationPrompt::Chat).collect())
    }

    /// Applies the options of template and sampling to the loaded model.
    fn prepare(&self, lm: Lm, clock: Clock) -> Result<(Lm, GenerateOptions)> {
        let lm = self.template.apply(lm)?.with_clock(clock);
        let options = self.sampling.options(&lm, MAX_NEW_TOKENS)?;
        if !self.raw {
            lm.chat_template()?;
        }
        Ok((lm, options))
    }

    /// Returns the conversations, each with the system message of the command line.
    fn chats(&self, prompts: &[String], messages: Option<&str>) -> Result<Vec<Conversation>> {
        let of_prompt = |prompt: &String| Conversation::new([Message::new("user", prompt)]);
        let mut chats = match (messages, &self.messages) {
            (Some(text), Some(path)) => parse_conversations(text, path)?,
            _ => prompts.iter().map(of_prompt).collect(),
        };
        for (chat, i) in chats.iter_mut().zip(1..) {
            self.complete(chat)
                .map_err(|error| anyhow!("failed to read conversation {i}: {error}").context(ExitCode::Data))?;
        }
        Ok(chats)
    }

    /// Prepends the system message to a conversation, and rejects one without a message to reply to.
    fn complete(&self, chat: &mut Conversation) -> Result<()> {
        if let Some(system) = &self.system {
            let has_own = chat.messages.first().is_some_and(|first| first.role() == "system");
            ensure!(!has_own, "it begins with a system message of its own; remove that, or --system");
            chat.messages.insert(0, Message::new("system", system));
        }
        let ends_with_an_answer = chat.messages.last().is_some_and(Message::is_assistant);
        ensure!(
            !ends_with_an_answer,
            "it ends with the assistant's message, so there is nothing to answer; remove that message"
        );
        Ok(())
    }

    /// Prints a reply, after its prompt if there are several.
    fn show(&self, n_answers: usize, prompt: &str, said: &GeneratedText) -> Result<()> {
        if said.finish_reason == FinishReason::Context {
            print_note("note: the answer ends where the model's context is full");
        }
        match self.timings {
            true => print_note(&serde_json::to_string(&said.timings)?),
            false => print_note(&said.timings.to_string()),
        }
        match n_answers {
            1 => print_generated(&said.text),
            _ => print_generated(&format!("> {prompt}\n{}\n", said.text.trim())),
        }
    }
}

fn text_or_stdin(prompt: &str) -> Result<String> {
    if prompt != "-" {
        return Ok(prompt.to_owned());
    }
    let text = read(Path::new("-"))?;
    Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

fn parse_conversations(text: &str, path: &Path) -> Result<Vec<Conversation>> {
    let failed = || anyhow!("failed to read messages from {}", path.display()).context(ExitCode::Data);
    conversations(text).map_err(|error| anyhow!("{}: {error:#}", failed()).context(ExitCode::Data))
}

fn read(path: &Path) -> Result<String> {
    let text = read_text_or_stdin(path, MAX_CONFIG_FILE_BYTES);
    text.with_context(|| format!("failed to read {}", path.display())).context(ExitCode::Data)
}
