//! Data preparation: from files of rows to steps of tokens.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use candlewick_text::hub::{Hub, HubSettings};
use candlewick_text::template::ChatTemplate;
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};
use serde_json::{Map, json};
use trainer::data::{
    Cursor, DataError, DataKind, DataPlan, Dataset, Horizon, MaskingStrategy, Mixture, Packing, Padding, PreparedData,
    RowOrder, Sampling, SourcePlan, TrainLoader, TrainOnEos, TrainedRole, Truncation, UnrenderedMessages, prepare,
    prepare_without_caching,
};

pub(crate) const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Template that prints three roles.
const THREE_ROLES: &str = "{% for m in messages if m.role in ['system', 'user', 'assistant'] %}<|im_start|>{{ m.role }}\n\
    {{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Folder for data and the cache, with a tokenizer whose tokens are single characters.
pub(crate) struct Bench {
    folder: tempfile::TempDir,
    template: &'static str,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let bench = Self { folder: tempfile::tempdir().unwrap(), template: CHATML };
        bench.write_tokenizer("~");
        bench
    }

    /// Writes the tokenizer. Another `last` token makes it another tokenizer.
    fn write_tokenizer(&self, last: &str) {
        let special = ["<unk>", "<s>", "<pad>", "<|im_start|>", "<|im_end|>"];
        let characters = (' '..='}').chain(['\n']).map(String::from).chain([last.to_owned()]);
        let vocab: Map<String, serde_json::Value> = (special.iter().map(|s| (*s).to_owned()))
            .chain(characters)
            .enumerate()
            .map(|(id, token)| (token, json!(id)))
            .collect();
        let added = |(id, content): (usize, &&str)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                   "rstrip": false, "normalized": false, "special": true})
        };
        let tokenizer = json!({
            "version": "1.0",
            "added_tokens": special.iter().enumerate().map(added).collect::<Vec<_>>(),
            "model": {"type": "BPE", "unk_token": "<unk>", "vocab": vocab, "merges": []},
            "decoder": {"type": "Fuse"},
        });
        let config = json!({"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>"});
        std::fs::write(self.path("tokenizer.json"), tokenizer.to_string()).unwrap();
        std::fs::write(self.path("tokenizer_config.json"), config.to_string()).unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, lines: &[String]) -> SourcePlan {
        std::fs::write(self.path(name), lines.join("\n") + "\n").unwrap();
        source(&self.path(name))
    }

    pub(crate) fn plan(&self, source: SourcePlan) -> DataPlan {
        DataPlan {
            kind: DataKind::Sft,
            sources: vec![source],
            eval_sources: Vec::new(),
            eval_fraction: 0.0,
            max_length: 256,
            truncation: Truncation::Error,
            packing: Packing::Off,
            fuse_positions_prob: 0.0,
            padding: Padding::Nothing,
            drop_last: false,
            order: RowOrder::Sequential,
            mixture: Mixture::Concatenate,
            masking_strategy: MaskingStrategy::TrainOnAssistant,
            roles_to_train: vec![TrainedRole::Assistant],
            train_on_eos: TrainOnEos::Turn,
            ignore_empty_think: false,
            train_on_empty_answers: false,
            unrendered_messages: UnrenderedMessages::Error,
            add_bos_token: None,
            add_eos_token: true,
            micro_batch_size: 1,
            gradient_accumulation_steps: 1,
            data_ranks: 1,
            min_iterations: 0,
            horizon: Horizon::Epochs(1.0),
            overfit_first_batch: false,
            seed: 42,
            cache_dir: self.path("cache"),
            fail_on_missing_cache: false,
            num_proc: 2,
            max_text_tokens: None,
            repeat_to_pack_max_length: false,
            dl_num_workers: 0,
            streaming: None,
            template_kwargs: Map::new(),
        }
    }

    fn tokenizer(&self) -> Tokenizer {
        Tokenizer::from_directory(self.folder.path()).unwrap()
    }

    pub(crate) fn prepare(&self, plan: &DataPlan) -> Result<PreparedData, DataError> {
        let tokenizer = self.tokenizer();
        let template = ChatTemplate::new("test template", self.template).unwrap();
        prepare(plan, &tokenizer, Some(tokenizer.with_special_tokens(template)), &self.hub())
    }

    /// Prepares without writes into the token cache.
    fn prepare_without_caching(&self, plan: &DataPlan) -> PreparedData {
        let tokenizer = self.tokenizer();
        let template = ChatTemplate::new("test template", self.template).unwrap();
        let template = tokenizer.with_special_tokens(template);
        prepare_without_caching(plan, &tokenizer, Some(template), &self.hub()).unwrap()
    }

    fn hub(&self) -> Hub {
        let settings = HubSettings { offline: true, ..HubSettings::new(self.path("hub")) };
        Hub::new(settings).unwrap()
    }

    /// Returns the error of preparing these rows.
    #[track_caller]
    fn refusal(&self, rows: &[String]) -> String {
        let plan = self.plan(self.write("train.jsonl", rows));
        self.prepare(&plan).unwrap_err().to_string()
    }

    /// Returns each sequence's text, with the targets in brackets.
    pub(crate) fn shown(&self, dataset: &Dataset) -> Vec<String> {
        let tokenizer = self.tokenizer();
        let text = |id: u32| tokenizer.decode(&[id], SpecialTokens::Include).unwrap();
        let show = |index: usize| {
            let sample = dataset.get(index);
            let (mut shown, mut inside) = (String::new(), false);
            for (id, learn) in sample.ids().zip(sample.target_mask()) {
                if learn != inside {
                    shown.push(if learn { '[' } else { ']' });
                    inside = learn;
                }
                shown.push_str(&text(id));
            }
            if inside { shown + "]" } else { shown }
        };
        (0..dataset.len()).map(show).collect()
    }
}

pub(crate) fn source(path: &Path) -> SourcePlan {
    SourcePlan {
        name_or_path: path.display().to_string(),
        split: None,
        subset: None,
        split_mapping: Vec::new(),
        revision: None,
        data_files: Vec::new(),
        field: None,
        sample_by: None,
        delimiter: None,
        format: None,
        role_mapping: Vec::new(),
        content_key: None,
        column: None,
        apply_chat_template: true,
        remove_none_values: None,
        sampling: Sampling::All,
        sample_seed: 42,
        snowflake: None,
    }
}

pub(crate) fn chat(question: &str, answer: &str) -> String {
    json!({"messages": [
        {"role": "user", "content": question}, {"role": "assistant", "content": answer},
    ]})
    .to_string()
}

pub(crate) fn chats(n: usize) -> Vec<String> {
    (0..n).map(|i| chat(&format!("{i}+1?"), &(i + 1).to_string())).collect()
}

#[test]
fn an_answer_and_its_end_token_are_targets() {
    let bench = Bench::new();
    let plan = bench.plan(bench.write("train.jsonl", &chats(2)));
    let prepared = bench.prepare(&plan).unwrap();
    let want = "<|im_start|>user\n0+1?<|im_end|>\n<|im_start|>assistant\n[1<|im_end|>]\n";
    assert_eq!(bench.shown(&prepared.train)[0], want);
    assert_eq!(prepared.train.locate(1), format!("{}:2", bench.path("train.jsonl").display()));
    let counts = prepared.token_stats.train;
    assert_eq!((counts.supervised.samples, counts.supervised.tokens), (2, 4));
    assert_eq!(counts.read, counts.kept);
    assert!(prepared.notes[0].contains("messages"), "{:?}", prepared.notes);
}

#[test]
fn without_a_mask_every_token_is_a_target() {
    let bench = Bench::new();
    let plan = bench.plan(bench.write("train.jsonl", &chats(1)));
    let prepared = bench.prepare(&DataPlan { masking_strategy: MaskingStrategy::TrainOnAll, ..plan }).unwrap();
    assert!(prepared.train.get(0).target_mask().all(|learn| learn));
}

#[test]
fn an_empty_think_block_can_be_masked() {
    let bench = Bench::new();
    let plan = bench.plan(bench.write("train.jsonl", &[chat("Hi", "<think>\n\n</think>\n\nyes")]));
    let learned = |ignore_empty_think| {
        let plan = DataPlan { ignore_empty_think, ..plan.clone() };
        bench.prepare(&plan).unwrap().token_stats.train.supervised.tokens
    };
    assert_eq!((learned(true), learned(false)), (4, 23));
}

#[test]
fn tokens_are_cached_and_a_miss_names_its_reason() {
    let bench = Bench::new();
    let plan = bench.plan(bench.write("train.jsonl", &chats(5)));
    let first = bench.prepare(&plan).unwrap();
    assert!(first.notes.join("\n").contains("not in the cache"), "{:?}", first.notes);
    let second = bench.prepare(&DataPlan { max_length: 100, ..plan.clone() }).unwrap();
    assert!(second.notes.join("\n").contains("from the cache"), "{:?}", second.notes);
    assert_eq!(bench.shown(&first.train), bench.shown(&second.train));
    bench.write_tokenizer("#~");
    let third = bench.prepare(&plan).unwrap();
    let why = "changed since they were cached: the tokenizer";
    assert!(third.notes.join("\n").contains(why), "{:?}", third.notes);
}

#[test]
fn edited_rows_are_tokenized_again() {
    let bench = Bench::new();
    let plan = bench.plan(bench.write("train.jsonl", &chats(5)));
    bench.prepare(&plan).unwrap();
    bench.write("train.jsonl", &[chat("new", "rows")]);
    let prepared = bench.prepare(&plan).unwrap();
    assert_eq!(prepared.train.len(), 1);
    let why = "changed since they were cached: the rows";
    assert!(prepared.notes.join("\n").contains(why), "{:?}", prepared.notes);
}

#[test]
fn a_missing_cache_can_be_an_error() {
    let bench = Bench::new();
    let plan = bench.plan(bench.write("train.jsonl", &chats(5)));
    let strict = DataPlan { fail_on_missing_cache: true, ..plan.clone() };
    let message = bench.prepare(&strict).unwrap_err().to_string();
    assert!(message.contains("not in the cache") && message.contains("trainer preprocess"), "{message}");
    bench.prepare(&plan).unwrap();
    bench.prepare(&strict).unwrap();
}

#[test]
fn a_preparation_without_caching_reads_the_cache_and_leaves_it_as_it_is() {
    let bench = Bench::new();
    let plan = bench.plan(bench.write("train.jsonl", &chats(5)));
    let entries = || std::fs::read_dir(&plan.cache_dir).map_or(0, Iterator::count);
    let tokenized = bench.prepare_without_caching(&plan);
    assert!(tokenized.notes.join("\n").contains("not in the cache"), "{:?}", tokenized.notes);
    assert_eq!(entries(), 0);
    bench.prepare(&plan).unwrap();
    let n_entries = entries();
    let found = bench.prepare_without_caching(&plan);
    assert!(found.notes.join("\n").contains("tokens from the cache"), "{:?}", found.notes);
    assert_eq!(bench.shown(&found.train), bench.shown(&tokenized.train));
    bench.write("train.jsonl", &[chat("new", "rows")]);
    assert_eq!(bench.prepare_without_caching(&plan).train.len(), 1);
    assert_eq!(entries(), n_entries);
}

#[test]
fn rows_beyond_max_length_are_named_by_file_and_line() {
    let bench = Bench::new();
    let rows = [chat("a", "b"), chat("a", &"b".repeat(300)), chat("a", &"b".repeat(400))];
    let message = bench.refusal(&rows);
    let file = bench.path("train.jsonl").display().to_string();
    assert!(message.starts_with("fit 2 of 3 samples into max_length 256"), "{message}");
    let third = message.find(&format!("{file}:3: ")).unwrap();
    assert!(third < message.find(&format!("{file}:2: ")).unwrap(), "{message}");
}

#[test]
fn chats_without_targets_are_refused() {
    let bench = Bench::new();
    let row = json!({"messages": [{"role": "user", "content": "anyone?"}]}).to_string();
    let message = bench.refusal(&[row]);
    assert!(message.contains("none of 15 training tokens is a target") && message.contains(":1"), "{message}");
}

#[test]
fn an_end_token_that_is_never_a_target_is_refused() {
    let mut bench = Bench::new();
    bench.template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}\
        {% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\
        <|im_end|>\n{% endfor %}";
    let message = bench.refusal(&chats(3));
    assert!(message.contains("none of \"<|im_end|>\" is ever a target"), "{message}");
}

#[test]
fn a_duplicated_bos_token_is_refused() {
    let mut bench = Bench::new();
    bench.template = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}";
    let message = bench.refusal(&[chat("fine", "yes"), chat("<s>twice", "no")]);
    assert!(message.contains("accept 1 of 2 samples") && message.contains(":2"), "{message}");
    assert!(message.contains("The chat template adds one"), "{message}");

    let texts = ["fine", "<s>twice"].map(|text| json!({"text": text}).to_string());
    let bench = Bench::new();
    let causal = |add_bos_token| DataPlan {
        kind: DataKind::Causal,
        add_bos_token: Some(add_bos_token),
        ..bench.plan(bench.write("texts.jsonl", &texts))
    };
    let message = bench.prepare(&causal(true)).unwrap_err().to_string();
    assert!(message.contains("accept 1 of 2 samples") && !message.contains("template"), "{message}");
    assert!(message.contains("set data.add_bos_token: false"), "{message}");
    assert!(bench.prepare(&causal(false)).is_ok());
}

#[test]
fn a_broken_row_is_named() {
    let message = Bench::new().refusal(&[chat("a", "b"), "{\"messages\": [".into()]);
    assert!(message.contains("train.jsonl:2"), "{message}");
}

#[test]
fn a_message_without_a_role_is_named() {
    let row = json!({"messages": [{"content": "x"}, {"role": "assistant", "content": "y"}]});
    let message = Bench::new().refusal(&[chat("a", "b"), row.to_string()]);
    assert!(message.contains("train.jsonl:2") && message.contains("role"), "{message}");
}

#[test]
fn a_sample_of_the_rows_is_drawn_by_its_seed() {
    let bench = Bench::new();
    let source = bench.write("train.jsonl", &chats(50));
    let drawn = |sampling, sample_seed| {
        let source = SourcePlan { sampling, sample_seed, ..source.clone() };
        bench.shown(&bench.prepare(&bench.plan(source)).unwrap().train)
    };
    let seven = drawn(Sampling::Count(7), 1);
    assert_eq!(seven.iter().collect::<BTreeSet<_>>().len(), 7);
    assert_eq!(seven, drawn(Sampling::Count(7), 1));
    assert_ne!(seven, drawn(Sampling::Count(7), 2));
    assert_eq!(drawn(Sampling::Ratio(0.1), 1).len(), 5);
}

#[test]
fn more_rows_than_there_are_cannot_be_drawn() {
    let bench = Bench::new();
    let source = bench.write("train.jsonl", &chats(5));
    let source = SourcePlan { sampling: Sampling::Count(6), ..source };
    let message = bench.prepare(&bench.plan(source)).unwrap_err().to_string();
    assert!(message.contains("sample_count") && message.contains("5 rows"), "{message}");
}

#[test]
fn a_fraction_is_held_out_and_never_trained_on() {
    let bench = Bench::new();
    let plan = bench.plan(bench.write("train.jsonl", &chats(40)));
    let prepared = bench.prepare(&DataPlan { eval_fraction: 0.1, ..plan }).unwrap();
    let train = bench.shown(&prepared.train);
    let eval = bench.shown(&prepared.eval.unwrap());
    assert_eq!((train.len(), eval.len()), (36, 4));
    assert_eq!(train.iter().chain(&eval).collect::<BTreeSet<_>>().len(), 40);
    assert_eq!(prepared.token_stats.eval.unwrap().kept.samples, 4);
}

#[test]
fn one_sample_cannot_be_split() {
    let bench = Bench::new();
    let plan = DataPlan { eval_fraction: 0.5, ..bench.plan(bench.write("train.jsonl", &chats(1))) };
    let message = bench.prepare(&plan).unwrap_err().to_string();
    assert!(message.contains("eval_sources"), "{message}");
}

#[test]
fn eval_sources_are_separate_from_training_data() {
    let bench = Bench::new();
    let plan = bench.plan(bench.write("train.jsonl", &chats(6)));
    let eval_sources = vec![bench.write("eval.jsonl", &[chat("held", "out")])];
    let prepared = bench.prepare(&DataPlan { eval_sources, ..plan }).unwrap();
    assert_eq!((prepared.train.len(), prepared.eval.unwrap().len()), (6, 1));
}

#[test]
fn causal_rows_have_exactly_max_length_tokens() {
    let bench = Bench::new();
    let texts = ["one".repeat(30), "two".into(), "three".repeat(9)];
    let rows: Vec<String> = texts.iter().map(|text| json!({"text": text}).to_string()).collect();
    let plan = DataPlan {
        kind: DataKind::Causal,
        packing: Packing::Exact,
        max_length: 16,
        ..bench.plan(bench.write("train.jsonl", &rows))
    };
    let prepared = bench.prepare(&plan).unwrap();
    // <|im_end|> follows each text; the tokenizer adds no <s>.
    let n_tokens: usize = texts.iter().map(|text| text.len() + 1).sum();
    assert_eq!(prepared.train.n_tokens() as usize, n_tokens);
    let mut stream = TrainLoader::new(prepared.train, plan, Cursor::default()).unwrap();
    let mut lengths = Vec::new();
    while let Some(step) = stream.next_step() {
        lengths.push(step.n_tokens());
    }
    assert_eq!(lengths.len(), n_tokens.div_ceil(16));
    assert!(lengths[..lengths.len() - 1].iter().all(|&length| length == 16), "{lengths:?}");
}

#[test]
fn template_variables_reach_the_template() {
    let mut bench = Bench::new();
    bench.template = "{% if loud %}LOUD{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
        {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\
        {% endif %}";
    let plan = bench.plan(bench.write("train.jsonl", &chats(1)));
    assert!(!bench.shown(&bench.prepare(&plan).unwrap().train)[0].starts_with("LOUD"));
    let template_kwargs = Map::from_iter([("loud".to_owned(), json!(true))]);
    let loud = bench.prepare(&DataPlan { template_kwargs, ..plan }).unwrap();
    assert!(bench.shown(&loud.train)[0].starts_with("LOUD"));
    let why = "changed since they were cached: the chat template";
    assert!(loud.notes.join("\n").contains(why), "{:?}", loud.notes);
}

#[test]
fn chats_need_a_template() {
    let bench = Bench::new();
    let plan = bench.plan(bench.write("train.jsonl", &chats(1)));
    let message = prepare(&plan, &bench.tokenizer(), None, &bench.hub()).unwrap_err().to_string();
    assert!(message.contains("chat template"), "{message}");
}

#[test]
fn a_cache_folder_that_cannot_be_created_is_an_error() {
    let bench = Bench::new();
    std::fs::write(bench.path("file"), "").unwrap();
    let plan = bench.plan(bench.write("train.jsonl", &chats(1)));
    let plan = DataPlan { cache_dir: bench.path("file").join("cache"), ..plan };
    let message = bench.prepare(&plan).unwrap_err().to_string();
    assert!(message.contains("data.cache_dir"), "{message}");
}

#[test]
fn a_missing_dataset_is_an_error() {
    let bench = Bench::new();
    for name in ["nobody/nothing", "missing.jsonl"] {
        let message = bench.prepare(&bench.plan(source(Path::new(name)))).unwrap_err().to_string();
        assert!(message.contains(name), "{message}");
    }
}

fn messages(messages: serde_json::Value) -> String {
    json!({"messages": messages}).to_string()
}

fn with_call(content: serde_json::Value) -> String {
    messages(json!([
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "Rain."},
    ]))
}

#[test]
fn unrendered_messages_are_refused_dropped_or_masked() {
    let bench = Bench::new();
    let rows = [chat("a", "b"), with_call(json!(null)), chat("c", "d"), with_call(json!("Let me look."))];
    let message = bench.refusal(&rows);
    let place = format!("{}:2", bench.path("train.jsonl").display());
    for want in ["render 2 of 4 training samples", "chat template test template", &place, "data.unrendered_messages"] {
        assert!(message.contains(want), "{want:?} is not in {message}");
    }
    let prepare = |unrendered_messages| {
        let plan = bench.plan(bench.write("train.jsonl", &rows));
        bench.prepare(&DataPlan { unrendered_messages, ..plan }).unwrap()
    };
    let dropped = prepare(UnrenderedMessages::Drop);
    assert_eq!(dropped.train.len(), 2);
    assert_eq!(
        (dropped.token_stats.train.unrendered_messages.samples, dropped.token_stats.train.dropped.samples),
        (2, 2)
    );
    let narrated = messages(
        json!([{"role": "narrator", "content": "Once."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]),
    );
    let message = Bench { template: THREE_ROLES, ..Bench::new() }.refusal(&[chat("a", "b"), narrated]);
    let want = "render 1 of 2 training samples: they hold messages whose content chat template test template does not render, the first at";
    assert!(message.contains(want), "{message}");
    let masked = prepare(UnrenderedMessages::Mask);
    assert_eq!(masked.train.len(), 4);
    let shown = bench.shown(&masked.train);
    assert_eq!(shown[1].matches('[').count(), 1, "{}", shown[1]);
    assert!(shown[1].contains("[Rain.<|im_end|>]") && !shown[3].contains("[Let me"), "{shown:?}");
    let notes = masked.notes.join("\n");
    assert!(notes.contains(&format!("warning: 2 of 4 training samples hold tool calls, or answers of reasoning alone, that chat template test template does not render, the first at {place}: these turns are masked in the loss")), "{notes}");
    // Cached tokens give the same warning.
    let again = prepare(UnrenderedMessages::Mask).notes.join("\n");
    assert!(again.contains("tokens from the cache") && again.contains("warning: 2 of 4"), "{again}");
}

#[test]
fn empty_answers_and_rows_without_answers_are_counted_and_not_trained_on() {
    let bench = Bench::new();
    let rows = [
        chat("a", "b"),
        chat("c", ""),
        messages(json!([{"role": "user", "content": "anyone?"}])),
        messages(json!([{"role": "user", "content": "e"}, {"role": "assistant", "content": null},
                        {"role": "user", "content": "f"}, {"role": "assistant", "content": "g"}])),
    ];
    let plan = bench.plan(bench.write("train.jsonl", &rows));
    let prepared = bench.prepare(&plan).unwrap();
    let counts = prepared.token_stats.train;
    assert_eq!((prepared.train.len(), counts.kept.samples), (2, 2));
    assert_eq!((counts.empty_answers.samples, counts.without_targets.samples, counts.dropped.samples), (2, 2, 2));
    let file = bench.path("train.jsonl").display().to_string();
    let notes = prepared.notes.join("\n");
    assert!(notes.contains(&format!("2 of 4 training samples hold an empty answer, the first at {file}:2")), "{notes}");
    assert!(notes.contains(&format!("2 of 4 training samples have no targets, the first at {file}:2")), "{notes}");
    let printed = prepared.token_stats.to_string();
    assert!(printed.contains("train without targets") && !printed.contains("train truncated"), "{printed}");
    let mut stream = TrainLoader::new(prepared.train, plan.clone(), Cursor::default()).unwrap();
    while let Some(step) = stream.next_step() {
        assert!(step.n_targets > 0);
    }

    let learned = bench.prepare(&DataPlan { train_on_empty_answers: true, ..plan }).unwrap();
    assert_eq!(learned.token_stats.train.without_targets.samples, 1);
    assert!(bench.shown(&learned.train)[1].ends_with("assistant\n[<|im_end|>]\n"));
}

#[test]
fn rows_whose_answers_are_truncated_make_no_steps() {
    let bench = Bench::new();
    let rows = [chat("a", "b"), chat(&"long ".repeat(50), "d")];
    let plan =
        DataPlan { truncation: Truncation::Truncate, max_length: 100, ..bench.plan(bench.write("train.jsonl", &rows)) };
    let prepared = bench.prepare(&plan).unwrap();
    assert_eq!(prepared.train.len(), 1);
    assert_eq!(prepared.token_stats.train.dropped.samples, 1);
}

#[test]
fn unknown_roles_are_named_with_a_role_mapping() {
    let bench = Bench::new();
    let own = messages(json!([{"role": "interviewer", "content": "a"}, {"role": "guest", "content": "b"}]));
    let message = bench.refusal(&[own.clone(), own.clone()]);
    let mapping = "role_mapping: {user: messages.role.interviewer, assistant: messages.role.guest}";
    for want in ["Roles: interviewer 2, guest 2; none is assistant", mapping] {
        assert!(message.contains(want), "{want:?} is not in {message}");
    }
    let mixed = messages(json!([{"role": "moderator", "content": "a"}, {"role": "user", "content": "b"},
                                {"role": "assistant", "content": "c"}]));
    let prepared = bench.prepare(&bench.plan(bench.write("train.jsonl", &[chat("a", "b"), mixed.clone()]))).unwrap();
    let notes = prepared.notes.join("\n");
    assert!(notes.contains("1 of 2 training samples hold roles that chat templates do not know"), "{notes}");
    assert!(notes.contains("(roles: moderator 1, user 1, assistant 1)"), "{notes}");
    let path = bench.write("pasted.jsonl", &[chat("a", "b"), mixed.clone()]);
    let whole = bench.prepare(&bench.plan(path.clone())).unwrap();
    let path_of = |role: &str| (role.to_owned(), format!("messages.role.{role}"));
    let pasted = SourcePlan { role_mapping: vec![path_of("user"), path_of("assistant")], ..path };
    let pasted = bench.prepare(&bench.plan(pasted)).unwrap();
    assert_eq!(bench.shown(&pasted.train), bench.shown(&whole.train));
    assert!(pasted.notes.join("\n").contains("1 of 2 training samples hold roles"), "{:?}", pasted.notes);
}

#[test]
fn a_text_file_is_one_document_of_causal_data() {
    let bench = Bench::new();
    std::fs::write(bench.path("play.txt"), "ROMEO:\nWhat, ho!\n\nJULIET:\nHo.\n").unwrap();
    let causal = |sample_by: Option<&str>, packing| DataPlan {
        kind: DataKind::Causal,
        packing,
        truncation: Truncation::Split,
        max_length: 16,
        ..bench.plan(SourcePlan { sample_by: sample_by.map(str::to_owned), ..source(&bench.path("play.txt")) })
    };
    let shown = |sample_by, packing| bench.shown(&bench.prepare(&causal(sample_by, packing)).unwrap().train).concat();
    let whole = "ROMEO:\nWhat, ho!\n\nJULIET:\nHo.\n<|im_end|>";
    for packing in [Packing::Off, Packing::Exact] {
        assert_eq!(shown(None, packing).replace(['[', ']'], ""), whole);
    }
    let lines = shown(Some("line"), Packing::Exact).replace(['[', ']'], "");
    assert_eq!(lines, "ROMEO:<|im_end|>What, ho!<|im_end|>JULIET:<|im_end|>Ho.<|im_end|>");
    let bare = DataPlan { add_bos_token: Some(true), add_eos_token: false, ..causal(None, Packing::Exact) };
    let bare = bench.shown(&bench.prepare(&bare).unwrap().train).concat();
    assert_eq!(bare.replace(['[', ']'], ""), format!("<s>{}", whole.trim_end_matches("<|im_end|>")));
}

#[test]
fn a_mistyped_path_is_named_before_any_request_to_the_hub() {
    let bench = Bench::new();
    bench.write("chats.jsonl", &chats(1));
    std::fs::create_dir(bench.path("mine")).unwrap();
    let message = |name: &str| {
        let source = SourcePlan { name_or_path: bench.path(name).display().to_string(), ..source(Path::new("x")) };
        bench.prepare(&bench.plan(source)).unwrap_err().to_string()
    };
    for (name, want) in
        [("chat.jsonl", "did you mean"), ("mime", "mine?"), ("mine/none", "there is no such file or folder")]
    {
        let message = message(name);
        assert!(message.contains(want) && !message.contains("Hub"), "{message}");
    }
}
