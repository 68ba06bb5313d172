//! Conversion of rows to documents, for each format.

use candlewick_text::format::{DatasetType, Document, FormatRequest, RowFormat};
use candlewick_text::source::ReadOptions;
use candlewick_text::template::{AddGenerationPrompt, ChatTemplate};

use super::Folder;

fn request() -> FormatRequest {
    FormatRequest::default()
}

/// Returns the format's description and the messages of the first row, one per line.
fn read(row: &str, request: &FormatRequest) -> Result<String, String> {
    let folder = Folder::new(&[("a.jsonl", row.as_bytes())]);
    let source = folder.open("a.jsonl", &ReadOptions::default())?;
    let format = RowFormat::find(request, &*source).map_err(|e| folder.short(e))?;
    let document = format.read(&*source, 0).map_err(|e| folder.short(e))?;
    Ok(format!("{}\n{}", format.describe(), show(&document)))
}

fn show(document: &Document) -> String {
    match document {
        Document::Text(text) => text.clone(),
        Document::PromptCompletion { prompt, completion } => format!("{prompt} -> {completion}"),
        Document::Tokens { ids, is_target } => format!("{ids:?} {is_target:?}"),
        Document::Conversation(chat) => {
            let lines = chat.messages.iter().map(|m| serde_json::to_string(m).unwrap());
            let tools = chat.tools.iter().map(|tools| format!("tools {tools}"));
            lines.chain(tools).collect::<Vec<_>>().join("\n")
        }
    }
}

#[track_caller]
fn check(row: &str, want: &[&str]) {
    assert_eq!(read(row, &request()).unwrap(), want.join("\n"));
}

#[track_caller]
fn refused(row: &str, request: &FormatRequest, want: &[&str]) {
    let error = read(row, request).unwrap_err();
    for want in want {
        assert!(error.contains(want), "{want:?} is not in {error:?}");
    }
}

fn roles(pairs: &[(&str, &str)]) -> FormatRequest {
    let own = |(role, path): &(&str, &str)| ((*role).to_owned(), (*path).to_owned());
    FormatRequest { role_mapping: pairs.iter().map(own).collect(), ..request() }
}

const USER: &str = r#"{"role":"user","content":"hi"}"#;
const ASSISTANT: &str = r#"{"role":"assistant","content":"yo"}"#;

/// datasets stores a `Sequence` of messages so.
#[test]
fn messages_as_a_struct_of_lists() {
    let row = r#"{"messages":{"role":["user","assistant"],"content":["hi","yo"],"name":null}}"#;
    check(row, &["reads as messages: messages", USER, ASSISTANT]);
    let row = r#"{"conversations":{"from":["human","gpt"],"value":["hi","yo"]}}"#;
    check(row, &["reads as sharegpt: conversations", USER, ASSISTANT]);
    let row = r#"{"prompt":{"role":["user"],"content":["hi"]},"completion":{"role":["assistant"],"content":["yo"]}}"#;
    let context = r#"{"role":"user","content":"hi","weight":0}"#;
    check(row, &["reads as prompt/completion: prompt, completion", context, ASSISTANT]);
    let row = r#"{"turns":{"role":["user","assistant"],"text":["hi","yo"]}}"#;
    let mapping = roles(&[("user", "turns.role.user"), ("assistant", "turns.role.assistant")]);
    assert!(read(row, &mapping).unwrap().ends_with(&[USER, ASSISTANT].join("\n")));
    let row = r#"{"messages":{"role":["user","assistant"],"content":["hi"]}}"#;
    let want = "`messages.content` is a list of 1, expected a list of 2, as `messages.role` is";
    refused(row, &request(), &["read a.jsonl:1 as messages", want]);
    let row = r#"{"messages":{"role":["user"],"content":"hi"}}"#;
    refused(row, &request(), &["`messages.content` is a string, expected a list of 1"]);
    refused(r#"{"messages":{"a":1}}"#, &request(), &["`messages` is an object, expected a list of messages"]);
    refused(r#"{"messages":null}"#, &request(), &["its columns are of no known format\n"]);
}

#[test]
fn messages() {
    let row = format!("{{\"prompt\":\"hi\",\"messages\":[{USER},{ASSISTANT}]}}");
    check(&row, &["reads as messages: messages", USER, ASSISTANT]);
    let row = format!("{{\"conversations\":[{USER},{ASSISTANT}],\"system\":\"be kind\"}}");
    let system = r#"{"role":"system","content":"be kind"}"#;
    check(&row, &["reads as messages: conversations", system, USER, ASSISTANT]);
    let text = serde_json::to_string(&format!("[{USER}]")).unwrap();
    check(&format!("{{\"messages\":{text}}}"), &["reads as messages: messages", USER]);
}

#[test]
fn messages_lose_null_fields_and_join_text_parts() {
    check(
        r#"{"messages":[{"role":"user","content":[{"type":"text","text":"h"},{"type":"text","value":"i"}],"name":null,"tool_calls":null,"loss_weight":0.0},{"role":"assistant","content":"yo","loss_weight":0.0},{"role":"assistant","content":"yo","weight":1}]}"#,
        &[
            "reads as messages: messages",
            r#"{"role":"user","content":"hi","weight":0}"#,
            r#"{"role":"assistant","content":"yo","weight":0}"#,
            ASSISTANT,
        ],
    );
}

#[test]
fn a_weight_is_0_or_1() {
    let row = |key: &str, weight: &str| {
        format!("{{\"messages\":[{USER},{{\"role\":\"assistant\",\"content\":\"yo\",\"{key}\":{weight}}}]}}")
    };
    let context = r#"{"role":"assistant","content":"yo","weight":0}"#;
    for (key, weight, want) in [
        ("weight", "0", context),
        ("train", "false", context),
        ("weight", "1.0", ASSISTANT),
        ("training", "true", ASSISTANT),
        ("loss_weight", "null", ASSISTANT),
    ] {
        check(&row(key, weight), &["reads as messages: messages", USER, want]);
    }
    let want = "read a.jsonl:1 as messages: column `messages`, item 1: key `weight` is the number 0.5, expected 0 or 1";
    refused(&row("weight", "0.5"), &request(), &[want]);
    refused(&row("loss_weight", "\"0\""), &request(), &["key `loss_weight` is a string"]);
    let users = r#"{"messages":[{"role":"user","content":"hi","weight":0.5},{"role":"assistant","content":"yo"}]}"#;
    check(users, &["reads as messages: messages", USER, ASSISTANT]);
}

#[test]
fn tool_calls_and_tools_become_what_templates_expect() {
    check(
        r#"{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"x\": 1}"}}]},{"role":"tool","content":"2","tool_call_id":"1"}],"tools":"[{\"name\":\"f\",\"parameters\":{}}]"}"#,
        &[
            "reads as messages: messages",
            r#"{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"x\": 1}"}}]}"#,
            r#"{"role":"tool","content":"2","tool_call_id":"1"}"#,
            r#"tools [{"type":"function","function":{"name":"f","parameters":{}}}]"#,
        ],
    );
}

#[test]
fn sharegpt_with_its_own_roles_and_calls() {
    check(
        r#"{"conversations":[{"from":"system","value":"s"},{"from":"human","value":"hi"},{"from":"function_call","value":"{\"name\": \"f\", \"arguments\": {\"x\": 1}}"},{"from":"observation","value":"2"},{"from":"gpt","value":"yo"}],"tools":"[]"}"#,
        &[
            "reads as sharegpt: conversations",
            r#"{"role":"system","content":"s"}"#,
            USER,
            r#"{"role":"assistant","content":"","tool_calls":[{"type":"function","function":{"name":"f","arguments":{"x":1}}}]}"#,
            r#"{"role":"tool","content":"2"}"#,
            ASSISTANT,
        ],
    );
}

#[test]
fn alpaca_with_input_history_and_system() {
    check(
        r#"{"instruction":"add","input":"1 2","output":"3","text":"Below is"}"#,
        &[
            "reads as alpaca: instruction, input, output",
            r#"{"role":"user","content":"add\n1 2"}"#,
            r#"{"role":"assistant","content":"3"}"#,
        ],
    );
    check(
        r#"{"instruction":"hi","input":"","output":"yo","system":"s","history":[["hi","yo"]]}"#,
        &[
            "reads as alpaca: instruction, input, output, history",
            r#"{"role":"system","content":"s"}"#,
            USER,
            ASSISTANT,
            USER,
            ASSISTANT,
        ],
    );
    check(
        r#"{"instruction":"hi","context":null,"response":"yo","category":"x"}"#,
        &["reads as alpaca: instruction, context, response", USER, ASSISTANT],
    );
}

#[test]
fn prompts_and_completions() {
    check(r#"{"question":"1+1?","answer":"2"}"#, &["reads as prompt/completion: question, answer", "1+1? -> 2"]);
    check(
        r#"{"prompt":[{"role":"user","content":"hi"},{"role":"assistant","content":"yo"},{"role":"user","content":"hi"}],"completion":[{"role":"assistant","content":"yo"}]}"#,
        &[
            "reads as prompt/completion: prompt, completion",
            r#"{"role":"user","content":"hi","weight":0}"#,
            r#"{"role":"assistant","content":"yo","weight":0}"#,
            r#"{"role":"user","content":"hi","weight":0}"#,
            ASSISTANT,
        ],
    );
    let pair = Document::PromptCompletion { prompt: "hi".into(), completion: "yo".into() };
    assert_eq!(show(&pair.into_chat()), format!("{USER}\n{ASSISTANT}"));
}

#[test]
fn plain_text_by_default_or_by_column() {
    check(r#"{"text":"hello","url":"x"}"#, &["reads as text: text", "hello"]);
    let causal = FormatRequest { purpose: DatasetType::Causal, ..request() };
    let row = r#"{"text":"hello","messages":[]}"#;
    assert_eq!(read(row, &causal).unwrap(), "reads as text: text\nhello");
    let column = FormatRequest { column: Some("body".into()), ..causal.clone() };
    assert_eq!(read(r#"{"body":"b"}"#, &column).unwrap(), "reads as text: body\nb");
    refused(r#"{"texts":"b"}"#, &causal, &["no column \"text\"", "did you mean \"texts\"?"]);
}

#[test]
fn role_mapping_from_columns_and_from_lists() {
    let flat = roles(&[("system", "s"), ("user", "q"), ("assistant", "a")]);
    let want = format!("reads as role_mapping: system = s, user = q, assistant = a\n{USER}\n{ASSISTANT}");
    assert_eq!(read(r#"{"s":"","q":"hi","a":"yo"}"#, &flat).unwrap(), want);
    let numbers = read(r#"{"s":null,"q":1,"a":2.5}"#, &flat).unwrap();
    assert!(numbers.ends_with("{\"role\":\"assistant\",\"content\":\"2.5\"}"), "{numbers}");

    let paths = roles(&[("user", "c.from.human"), ("assistant", "c.from.gpt"), ("assistant", "a")]);
    let row =
        r#"{"c":[{"from":"human","value":"hi"},{"from":"gpt","value":"yo"},{"from":"human","value":"hi"}],"a":"yo"}"#;
    let read = read(row, &paths).unwrap();
    assert!(read.ends_with(&[USER, ASSISTANT, USER, ASSISTANT].join("\n")), "{read}");
}

#[test]
fn role_mapping_with_a_content_key() {
    let row = r#"{"c":[{"r":"u","content":"no","body":"hi"}]}"#;
    let with_key = FormatRequest { content_key: Some("body".into()), ..roles(&[("user", "c.r.u")]) };
    assert!(read(row, &with_key).unwrap().ends_with(USER));
}

#[test]
fn messages_with_a_content_key() {
    let row = r#"{"chat":[{"role":"user","body":"hi"},{"role":"assistant","body":"yo","content":"no"}]}"#;
    let key = |format: Option<&str>, column: Option<&str>| FormatRequest {
        content_key: Some("body".into()),
        format: format.map(str::to_owned),
        column: column.map(str::to_owned),
        ..request()
    };
    for request in [key(None, None), key(Some("messages"), None), key(None, Some("chat"))] {
        let want = format!("reads as messages: chat, text under body\n{USER}\n{ASSISTANT}");
        assert_eq!(read(row, &request).unwrap(), want);
    }
    refused(r#"{"chat":[{"role":"user","content":"hi"}]}"#, &key(None, None), &["item 0: there is no key `body`"]);
}

#[test]
fn keys_without_effect_are_refused() {
    let row = r#"{"instruction":"hi","output":"yo","messages":[]}"#;
    let base = || FormatRequest { column: Some("messages".into()), ..request() };
    let named = |name: &str| Some(name.to_owned());
    let mapping = roles(&[("user", "instruction")]);
    for (request, key, with) in [
        (FormatRequest { format: named("text"), ..mapping.clone() }, "use format", "role_mapping"),
        (FormatRequest { column: named("output"), ..mapping.clone() }, "use column", "role_mapping"),
        (FormatRequest { format: named("alpaca"), ..base() }, "use column", "format: alpaca"),
        (FormatRequest { format: named("prompt_completion"), ..base() }, "use column", "format: prompt_completion"),
        (
            FormatRequest { format: named("sharegpt"), content_key: named("x"), ..base() },
            "use content_key",
            "format: sharegpt",
        ),
        (
            FormatRequest { purpose: DatasetType::Causal, content_key: named("x"), ..base() },
            "use content_key",
            "plain text",
        ),
    ] {
        refused(row, &request, &[key, &format!("it has no effect together with {with}")]);
    }
}

#[test]
fn a_named_column_wins_over_what_is_known_of_a_data_set() {
    let known = FormatRequest { id: Some("Open-Orca/OpenOrca".into()), column: Some("text".into()), ..request() };
    assert_eq!(read(r#"{"question":"hi","text":"hello"}"#, &known).unwrap(), "reads as text: text\nhello");
}

#[test]
fn role_mapping_that_does_not_fit_is_explained() {
    refused(r#"{"a":1}"#, &roles(&[("user", "a.b")]), &["neither a column nor list.field.value"]);
    refused(r#"{"question":"x"}"#, &roles(&[("user", "qestion")]), &["did you mean \"question\"?"]);
    refused(
        r#"{"c":[{"role":"x","content":"y"}]}"#,
        &roles(&[("user", "c.role.user")]),
        &["no message at user = c.role.user", "the row holds c (a list of {role, content})"],
    );
    refused(r#"{"q":{"x":1}}"#, &roles(&[("user", "q")]), &["column `q` is an object, expected a string"]);
}

#[test]
fn known_data_sets_need_no_mapping() {
    let known = |id: &str| FormatRequest { id: Some(id.into()), ..request() };
    let row = r#"{"system_prompt":"","question":"hi","response":"yo","id":"1"}"#;
    assert!(read(row, &known("Open-Orca/OpenOrca")).unwrap().ends_with(&format!("{USER}\n{ASSISTANT}")));
    let row = r#"{"messages":[{"role":"user","content":"hi"}],"answer":"yo"}"#;
    let ace = read(row, &known("nvidia/AceMath-Instruct-Training-Data")).unwrap();
    assert!(ace.ends_with(&format!("{USER}\n{ASSISTANT}")), "{ace}");
}

#[test]
fn a_named_format_is_taken_at_its_word() {
    let named = |name: &str| FormatRequest { format: Some(name.into()), ..request() };
    let row = r#"{"instruction":"hi","output":"yo","messages":[{"role":"user","content":"x"}]}"#;
    assert!(read(row, &named("alpaca")).unwrap().starts_with("reads as alpaca: instruction, output"));
    refused(row, &named("alpacca"), &["did you mean \"alpaca\"?", "messages, sharegpt"]);
    refused(r#"{"a":1}"#, &named("alpaca"), &["no columns for alpaca", "columns: a"]);
}

#[test]
fn unknown_and_ambiguous_columns_list_what_is_there() {
    refused(
        r#"{"id":1,"mesages":[]}"#,
        &request(),
        &[
            "detect the format of a.jsonl:1",
            "\"mesages\" is near \"messages\"",
            "columns: id, mesages",
            "known: messages (role, content), sharegpt",
        ],
    );
    let row = format!("{{\"messages\":[{USER}],\"conversations\":[{USER}]}}");
    refused(&row, &request(), &["messages and conversations both hold chats"]);
    refused(
        r#"{"prompt":"a","completion":"b","question":"c","answer":"d"}"#,
        &request(),
        &["prompt and completion; question and answer"],
    );
    refused(r#"{"question":"a","options":"b"}"#, &request(), &["\"question\" is there, but not what goes with it"]);
    refused(r#"{"prompt":"a","chosen":"b","rejected":"c"}"#, &request(), &["preferences"]);
}

#[test]
fn broken_rows_name_column_type_and_fix() {
    refused(
        r#"{"instruction":"x","output":3}"#,
        &request(),
        &["read a.jsonl:1 as alpaca: column `output` is the number 3, expected a string; correct the row"],
    );
    refused(r#"{"prompt":"x","completion":["a"]}"#, &request(), &["column `completion` is a list of 1"]);
    refused(
        r#"{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":5}]}"#,
        &request(),
        &["column `messages`, item 1", "`content` is a number"],
    );
    refused(
        r#"{"conversations":[{"from":"humna","value":"x"}]}"#,
        &request(),
        &["item 0: `from` is \"humna\", expected one of system, human", "role_mapping"],
    );
    refused(
        r#"{"conversations":[{"from":"function_call","value":"f(1)"}]}"#,
        &request(),
        &["is not a call", "\"arguments\""],
    );
    refused(r#"{"messages":[]}"#, &request(), &["the conversation has no messages"]);
    refused(
        r#"{"messages":[{"role":"user","content":"x"}],"tools":"{oops"}"#,
        &request(),
        &["column `tools` is not JSON"],
    );
}

#[test]
fn an_error_in_a_later_row_names_its_line() {
    let folder = Folder::new(&[("a.jsonl", b"{\"text\":\"a\"}\n\n{\"text\":null}\n")]);
    let source = folder.open("a.jsonl", &ReadOptions::default()).unwrap();
    let format = RowFormat::find(&request(), &*source).unwrap();
    let error = folder.short(format.read(&*source, 1).unwrap_err());
    assert_eq!(
        error,
        "read a.jsonl:3 as text: column `text` is null, expected a string; correct the row, or name \
         the right column in the recipe"
    );
}

#[test]
fn speakers_of_messages_have_their_usual_names() {
    let row = r#"{"messages":[{"role":"human","content":"hi"},{"role":"Bot","content":"yo"},{"role":"User","content":"hi"},{"role":"model","content":"yo"}]}"#;
    check(row, &["reads as messages: messages", USER, ASSISTANT, USER, ASSISTANT]);
}

#[test]
fn a_null_answer_is_an_empty_one() {
    let row = format!("{{\"messages\":[{USER},{{\"role\":\"assistant\",\"content\":null}}]}}");
    check(&row, &["reads as messages: messages", USER, r#"{"role":"assistant","content":""}"#]);
    refused(r#"{"messages":[{"role":"user","content":null}]}"#, &request(), &["item 0: ", "`content` is null"]);
}

#[test]
fn parts_that_are_no_text_are_named() {
    for (part, want) in [
        (r#"{"type":"image_url","image_url":{"url":"x"}}"#, "part 1 of `content` is image (image_url); images are not"),
        (r#"{"type":"image"}"#, "images are not supported"),
        (r#"{"type":"input_audio","input_audio":{}}"#, "is audio (input_audio); audio is not supported"),
        (r#"{"type":"file"}"#, "is of type \"file\"; only text is supported"),
    ] {
        let row = format!(
            "{{\"messages\":[{{\"role\":\"user\",\"content\":[{{\"type\":\"text\",\"text\":\"a\"}},{part}]}},{ASSISTANT}]}}"
        );
        refused(&row, &request(), &["column `messages`, item 0: part 1", want]);
    }
}

/// Reads a row with the mapping that an error proposes.
#[track_caller]
fn paste(row: &str, error_of: &FormatRequest, mapping: &[(&str, &str)], content_key: Option<&str>, want: &str) {
    let pairs: Vec<String> = mapping.iter().map(|(role, path)| format!("{role}: {path}")).collect();
    let key = content_key.map(|key| format!(", content_key: {key}")).unwrap_or_default();
    refused(row, error_of, &[&format!("role_mapping: {{{}}}{key}", pairs.join(", "))]);
    let request = FormatRequest { content_key: content_key.map(str::to_owned), ..roles(mapping) };
    let read = read(row, &request).unwrap();
    assert!(read.ends_with(want), "{read}");
}

#[test]
fn errors_propose_mappings_that_work() {
    let chat = format!("{USER}\n{ASSISTANT}");
    let row = r#"{"dialog":[{"speaker":"anna","utterance":"hi"},{"speaker":"otto","utterance":"yo"}]}"#;
    let mapping = [("user", "dialog.speaker.anna"), ("assistant", "dialog.speaker.otto")];
    paste(row, &request(), &mapping, Some("utterance"), &chat);
    refused(row, &request(), &["item 0 of `dialog` has no `role` (its keys: speaker, utterance)"]);

    let row = r#"{"messages":[{"role":"human","content":"hi"},{"role":"bot","content":"yo"}]}"#;
    let mapping = [("user", "messages.role.human"), ("assistant", "messages.role.bot")];
    paste(row, &roles(&[("user", "human"), ("assistant", "bot")]), &mapping, None, &chat);
    paste(row, &roles(&[("human", "user"), ("bot", "assistant")]), &mapping, None, &chat);

    let row = r#"{"conversations":[{"from":"moderator","value":"hi"},{"from":"guest","value":"yo"}]}"#;
    let mapping = [("user", "conversations.from.moderator"), ("assistant", "conversations.from.guest")];
    paste(row, &request(), &mapping, None, &chat);
}

#[test]
fn a_message_without_a_role_is_the_cause() {
    refused(
        r#"{"messages":[{"content":"q"},{"content":"a"}]}"#,
        &request(),
        &["item 0 of `messages` has no `role` (its keys: content)"],
    );
}

#[test]
fn role_mapping_keeps_turns_that_it_does_not_name() {
    let row = r#"{"messages":[{"role":"system","content":"s"},{"role":"user","content":"hi"},{"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f","arguments":{}}}]},{"role":"tool","content":"2"},{"role":"moderator","content":"m"},{"role":"assistant","content":"yo"}],"tools":[{"name":"f"}]}"#;
    let want = [
        r#"{"role":"system","content":"s"}"#,
        USER,
        r#"{"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f","arguments":{}}}]}"#,
        r#"{"role":"tool","content":"2"}"#,
        r#"{"role":"moderator","content":"m"}"#,
        ASSISTANT,
        r#"tools [{"type":"function","function":{"name":"f"}}]"#,
    ];
    let assistant = ("assistant", "messages.role.assistant");
    for user in ["messages.role.user", "messages.role.usr"] {
        let read = read(row, &roles(&[("user", user), assistant])).unwrap();
        assert!(read.ends_with(&want.join("\n")), "{read}");
    }
    let row = r#"{"c":[{"from":"anna","value":"hi"},{"from":"function_call","value":"{\"name\":\"f\"}"},{"from":"observation","value":"2"},{"from":"gpt","value":"yo"}]}"#;
    let call = r#"{"role":"assistant","content":"","tool_calls":[{"type":"function","function":{"name":"f"}}]}"#;
    let read = read(row, &roles(&[("user", "c.from.anna")])).unwrap();
    assert!(read.ends_with(&[USER, call, r#"{"role":"tool","content":"2"}"#, ASSISTANT].join("\n")), "{read}");
}

#[test]
fn rows_with_images_in_a_column_are_refused() {
    let turns = r#"[{"from":"human","value":"<image>hi"},{"from":"gpt","value":"yo"}]"#;
    for (column, value, want) in [
        ("images", r#"["a.png"]"#, "column `images` is not empty; images are not supported"),
        ("image", r#""a.png""#, "column `image` is not empty; images are not supported"),
        ("videos", r#"["a.mp4"]"#, "videos are not supported"),
        ("audios", r#"["a.wav"]"#, "audio is not supported"),
    ] {
        let row = format!("{{\"conversations\":{turns},\"{column}\":{value}}}");
        refused(&row, &request(), &["read a.jsonl:1 as sharegpt", want]);
        let row = format!("{{\"messages\":[{USER},{ASSISTANT}],\"{column}\":{value}}}");
        refused(&row, &request(), &["read a.jsonl:1 as messages", want]);
    }
    let row = format!("{{\"messages\":[{USER},{ASSISTANT}],\"images\":[],\"image\":null}}");
    check(&row, &["reads as messages: messages", USER, ASSISTANT]);
}

#[test]
fn a_function_call_is_a_tool_call() {
    let call = r#"{"name":"f","arguments":"{}"}"#;
    let row = format!(
        "{{\"messages\":[{USER},{{\"role\":\"assistant\",\"content\":null,\"function_call\":{call}}},\
         {{\"role\":\"assistant\",\"content\":\"yo\",\"function_call\":null}}]}}"
    );
    let want =
        format!(r#"{{"role":"assistant","content":null,"tool_calls":[{{"type":"function","function":{call}}}]}}"#);
    check(&row, &["reads as messages: messages", USER, &want, ASSISTANT]);
}

/// Renders the tool calls and tools of the first row.
fn calls_of(row: &str) -> String {
    const SOURCE: &str = "{% for m in messages %}{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}\
                          {% endfor %}{% endfor %}{{ tools | tojson if tools }}";
    let folder = Folder::new(&[("a.jsonl", row.as_bytes())]);
    let source = folder.open("a.jsonl", &ReadOptions::default()).unwrap();
    let format = RowFormat::find(&request(), &*source).unwrap();
    let Document::Conversation(chat) = format.read(&*source, 0).unwrap() else { panic!("{row} is no chat") };
    let template = ChatTemplate::new("calls", SOURCE).unwrap();
    template.render(&template.adapt(&chat), AddGenerationPrompt::No).unwrap()
}

// `json.loads` and `json.dumps` of Python keep all digits, too.
#[test]
fn integers_of_rows_keep_all_digits() {
    let wei = "115792089237316195423570985008687907853269984665640564039457584007913129639935";
    for digits in ["12345678901234567890123", "-12345678901234567890", &i128::MAX.to_string(), wei] {
        let arguments = format!("{{\"n\": [{digits}, 1.0, 1e16, 18446744073709551615]}}");
        let quoted = serde_json::to_string(&arguments).unwrap();
        let call = |arguments: &str| format!(r#"{{"name": "f", "arguments": {arguments}}}"#);
        let answer =
            |call: &str| format!(r#"[{{"role": "assistant", "content": "", "tool_calls": [{{"function": {call}}}]}}]"#);
        let text = |json: &str| serde_json::to_string(json).unwrap();
        for row in [
            format!(r#"{{"messages": {}}}"#, answer(&call(&arguments))),
            format!(r#"{{"messages": {}}}"#, answer(&call(&quoted))),
            format!(r#"{{"messages": {}}}"#, text(&answer(&call(&arguments)))),
            format!(r#"{{"messages": [{USER}], "tools": [{{"name": "f", "parameters": {arguments}}}]}}"#),
            format!(r#"{{"messages": [{USER}], "tools": {}}}"#, text(&format!("[{}]", call(&arguments)))),
            format!(r#"{{"conversations": [{{"from": "function_call", "value": {}}}]}}"#, text(&call(&arguments))),
        ] {
            let printed = calls_of(&row);
            let want = format!("{{\"n\": [{digits}, 1.0, 1e+16, 18446744073709551615]}}");
            assert!(printed.contains(&want), "{row}\n{printed}");
        }
        let row = format!(r#"{{"messages": [{{"role": "user", "content": {digits}}}]}}"#);
        refused(&row, &request(), &["`content` is a number"]);
        let with_key = FormatRequest { content_key: Some("body".into()), ..roles(&[("user", "c.r.u")]) };
        let row = format!(r#"{{"c": [{{"r": "u", "body": {digits}}}]}}"#);
        assert!(read(&row, &with_key).unwrap().contains(&format!(r#""content":"{digits}""#)));
    }
}
