//! Row format detection: the recipe's options, else the first rows.

use std::borrow::Cow;
use std::collections::HashSet;

use serde_json::Value;

use super::error::{RowProblem, type_name};
use super::hints;
use super::known_datasets::known_role_mapping;
use super::row_format::RowFormat;
use super::struct_of_lists::with_lists_of_messages;
use super::token_ids::INPUT_IDS;
use super::{Alpaca, FormatError, Messages, PromptCompletionColumns, RoleMapping, ShareGpt, TextColumn, TokenIds};
use crate::long_integer;
use crate::source::{Row, RowSource};
use crate::suggestion::nearest;

/// Recipe options about the columns of a data set. By default none is set.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FormatRequest {
    /// Kind of training that the data set serves.
    pub purpose: DatasetType,
    /// Name of the row format, such as `alpaca`.
    pub format: Option<String>,
    /// Pairs of a chat role and the column path of its text, in message order.
    pub role_mapping: Vec<(String, String)>,
    /// Key of the message text: in the mapped list, or else in the messages.
    pub content_key: Option<String>,
    /// Column of plain text, or of the messages.
    pub column: Option<String>,
    /// Hub id. Some well-known ids have a built-in role mapping.
    pub id: Option<String>,
}

/// Kind of training that a data set serves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DatasetType {
    /// Supervised fine-tuning on chats. A `text` column is used only if no chat columns exist.
    #[default]
    Instruct,
    /// Causal language modelling on plain text.
    Causal,
}

/// Format names that a recipe accepts.
const NAMES: [&str; 6] = ["messages", "sharegpt", "alpaca", "prompt_completion", "text", "token_ids"];
const MESSAGES_NAMES: [&str; 3] = ["messages", "openai", "chatml"];
const PAIR_NAMES: [&str; 3] = ["prompt_completion", "prompt-completion", "prompt/completion"];
const CHAT_COLUMNS: [&str; 6] = ["messages", "conversations", "conversation", "chat", "dialogue", "dialog"];
const INPUTS: [&str; 2] = ["input", "context"];
const OUTPUTS: [&str; 2] = ["output", "response"];
const PAIRS: [(&str, &str); 9] = [
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answer"),
    ("problem", "solution"),
    ("user", "assistant"),
    ("input", "output"),
];
/// Number of rows inspected. JSON rows may omit columns, so one row is not enough.
const N_LOOKED_AT: usize = 16;

impl RowFormat {
    /// Returns the format that `request` names, else the format detected from the first rows of `source`.
    pub fn find(request: &FormatRequest, source: &dyn RowSource) -> Result<Self, FormatError> {
        check_keys(request)?;
        let first_rows = FirstRows::of(source)?;
        let known = request.id.as_deref().filter(|_| request.column.is_none()).and_then(known_role_mapping);
        let format = if !request.role_mapping.is_empty() {
            mapped(&first_rows, &request.role_mapping, request.content_key.as_deref())?
        } else if let Some(name) = &request.format {
            by_name(&first_rows, name, request)?
        } else if let Some(known) = known {
            let own = |(role, path): &(&str, &str)| ((*role).to_owned(), (*path).to_owned());
            let roles: Vec<_> = known.iter().map(own).collect();
            mapped(&first_rows, &roles, request.content_key.as_deref())?
        } else if request.purpose == DatasetType::Causal {
            text(&first_rows, request)?
        } else if request.content_key.is_some() {
            by_name(&first_rows, "messages", request)?
        } else if let Some(column) = &request.column {
            chat_in(&first_rows, first_rows.require(column)?).unwrap_or_else(|| text_in(column))
        } else {
            detect_format(&first_rows)?
        };
        for (row, place) in first_rows.rows.iter().zip(&first_rows.places).take(1) {
            format.parse(row).map_err(|fault| invalid_row(place.clone(), format.name(), fault))?;
        }
        Ok(format)
    }
}

fn invalid_row(place: String, format: &'static str, RowProblem { problem, fix }: RowProblem) -> FormatError {
    FormatError::InvalidRow { place, format, problem, fix }
}

/// Rejects options that another option would leave without effect.
fn check_keys(request: &FormatRequest) -> Result<(), FormatError> {
    let clash = |key: &'static str, with: &str| {
        let problem = format!("it has no effect together with {with}; remove one of the two");
        Err(FormatError::InvalidOption { key, problem })
    };
    let format = request.format.as_deref();
    if !request.role_mapping.is_empty() {
        return match (format, &request.column) {
            (Some(_), _) => clash("format", "role_mapping"),
            (_, Some(_)) => clash("column", "role_mapping"),
            _ => Ok(()),
        };
    }
    let has_column = !format.is_some_and(|name| ["alpaca", "token_ids"].contains(&name) || PAIR_NAMES.contains(&name));
    let is_text = request.purpose == DatasetType::Causal && format.is_none();
    match (&request.column, &request.content_key, format) {
        (Some(_), _, Some(name)) if !has_column => clash("column", &format!("format: {name}")),
        (_, Some(_), Some(name)) if !MESSAGES_NAMES.contains(&name) => clash("content_key", &format!("format: {name}")),
        (_, Some(_), None) if is_text => clash("content_key", "plain text (type: causal)"),
        _ => Ok(()),
    }
}

/// First rows of a data set, with their locations and columns.
struct FirstRows {
    rows: Vec<Row>,
    places: Vec<String>,
    columns: Vec<String>,
}

impl FirstRows {
    fn of(source: &dyn RowSource) -> Result<Self, FormatError> {
        let n_rows = source.len().min(N_LOOKED_AT);
        let read = |row_idx: usize| {
            let row = source.row(row_idx)?;
            let listed = with_lists_of_messages(&row).map(Cow::into_owned);
            listed.map_err(|fault| invalid_row(source.locate(row_idx), "messages", fault))
        };
        let rows = (0..n_rows).map(read).collect::<Result<Vec<_>, FormatError>>()?;
        let mut names = HashSet::new();
        let columns = rows.iter().flat_map(Row::keys).filter(|name| names.insert(*name)).cloned().collect();
        let places = (0..n_rows).map(|i| source.locate(i)).collect();
        Ok(Self { rows, places, columns })
    }

    fn has(&self, column: &str) -> bool {
        self.columns.iter().any(|own| own == column)
    }

    fn first_of<'a>(&self, columns: &[&'a str]) -> Option<&'a str> {
        columns.iter().copied().find(|column| self.has(column))
    }

    fn require<'a>(&self, column: &'a str) -> Result<&'a str, FormatError> {
        if self.has(column) {
            return Ok(column);
        }
        Err(self.unknown(format!("there is no column {column:?}{}", self.near(column))))
    }

    /// Returns the first value of the column that is not null.
    fn value(&self, column: &str) -> Option<&Value> {
        self.rows.iter().filter_map(|row| row.get(column)).find(|value| !value.is_null())
    }

    fn near(&self, wanted: &str) -> String {
        let near = nearest(wanted, &self.columns);
        near.map_or(String::new(), |own| format!("; did you mean {own:?}?"))
    }

    fn unknown(&self, problem: String) -> FormatError {
        FormatError::UnknownFormat {
            place: self.places.first().cloned().unwrap_or_else(|| "an empty data set".into()),
            problem,
            columns: self.columns.join(", "),
            help: "known: messages (role, content), sharegpt (from, value), alpaca (instruction, \
                   input, output), prompt and completion (also question and answer), text; or name \
                   the columns: role_mapping: {user: COLUMN, assistant: COLUMN}, or column: COLUMN for \
                   plain text"
                .into(),
        }
    }
}

fn by_name(first_rows: &FirstRows, name: &str, request: &FormatRequest) -> Result<RowFormat, FormatError> {
    let column = request.column.as_deref();
    let missing = |wanted: &str| first_rows.unknown(format!("it has no columns for {name}: {wanted}"));
    match name {
        name if MESSAGES_NAMES.contains(&name) => {
            let column = column.or_else(|| first_rows.first_of(&CHAT_COLUMNS));
            let column = first_rows.require(column.unwrap_or("messages"))?.to_owned();
            Ok(RowFormat::Messages(Messages { column, content_key: request.content_key.clone() }))
        }
        "sharegpt" => {
            let column = column.or_else(|| first_rows.first_of(&["conversations", "conversation", "messages"]));
            let column = first_rows.require(column.unwrap_or("conversations"))?.to_owned();
            Ok(RowFormat::ShareGpt(ShareGpt { column }))
        }
        "alpaca" => alpaca(first_rows).ok_or_else(|| missing("instruction, output")),
        name if PAIR_NAMES.contains(&name) => pairs(first_rows)?.ok_or_else(|| missing("prompt, completion")),
        "text" => text(first_rows, request),
        "token_ids" => {
            first_rows.require(INPUT_IDS)?;
            Ok(RowFormat::TokenIds(TokenIds))
        }
        other => {
            let near = nearest(other, NAMES).map_or(".".to_owned(), |near| format!("; did you mean {near:?}?"));
            let problem = format!("{other:?} is not a format{near} There are: {}", NAMES.join(", "));
            Err(FormatError::InvalidOption { key: "format", problem })
        }
    }
}

fn detect_format(first_rows: &FirstRows) -> Result<RowFormat, FormatError> {
    if let Some(format) = chat(first_rows)? {
        return Ok(format);
    }
    if first_rows.has("chosen") && first_rows.has("rejected") {
        let problem = "its rows are preferences (chosen, rejected), not responses to train on".to_owned();
        return Err(first_rows.unknown(problem));
    }
    if let Some(format) = alpaca(first_rows) {
        return Ok(format);
    }
    if let Some(format) = pairs(first_rows)? {
        return Ok(format);
    }
    if first_rows.has("text") {
        return Ok(text_in("text"));
    }
    if let Some(problem) = nearly_chat(first_rows) {
        return Err(first_rows.unknown(problem));
    }
    Err(first_rows.unknown(format!("its columns are of no known format{}", near_column(first_rows))))
}

/// Describes a chat column that is no list, or a list whose items are not messages.
fn nearly_chat(first_rows: &FirstRows) -> Option<String> {
    let (column, value) = CHAT_COLUMNS.iter().find_map(|column| Some((*column, first_rows.value(column)?)))?;
    let Some(items) = value.as_array() else {
        let found = type_name(value);
        return Some(format!("`{column}` is {found}, expected a list of messages {{role, content}}"));
    };
    let problem = match items.first()? {
        Value::Object(item) => {
            let keys: Vec<&str> = item.keys().map(String::as_str).collect();
            format!("item 0 of `{column}` has no `role` (its keys: {})", keys.join(", "))
        }
        other => format!("item 0 of `{column}` is {}, expected a message {{role, content}}", type_name(other)),
    };
    let paste = hints::mapping(column, items).map(|mapping| format!("; to read it: {mapping}"));
    Some(problem + &paste.unwrap_or_default())
}

/// Names one column of an incomplete pair, or a column with a name similar to a known one.
fn near_column(first_rows: &FirstRows) -> String {
    let halves =
        ["instruction"].into_iter().chain(PAIRS.iter().flat_map(|(prompt, completion)| [*prompt, *completion]));
    if let Some(half) = halves.clone().find(|half| first_rows.has(half)) {
        return format!("; {half:?} is there, but not what goes with it");
    }
    let mut known = CHAT_COLUMNS.into_iter().chain(halves).chain(["text"]).filter(|known| !first_rows.has(known));
    let near = known.find_map(|known| Some((known, nearest(known, &first_rows.columns)?)));
    near.map_or(String::new(), |(known, own)| format!("; {own:?} is near {known:?}"))
}

fn chat(first_rows: &FirstRows) -> Result<Option<RowFormat>, FormatError> {
    let found: Vec<(&str, RowFormat)> =
        CHAT_COLUMNS.iter().filter_map(|column| Some((*column, chat_in(first_rows, column)?))).collect();
    match found.as_slice() {
        [] => Ok(None),
        [(_, format)] => Ok(Some(format.clone())),
        several => {
            let columns: Vec<_> = several.iter().map(|(column, _)| *column).collect();
            let columns = columns.join(" and ");
            Err(first_rows.unknown(format!("{columns} both hold chats; name one with column: ...")))
        }
    }
}

/// Returns the chat format of the list in `column`, by the keys of its items.
fn chat_in(first_rows: &FirstRows, column: &str) -> Option<RowFormat> {
    let value = first_rows.value(column)?;
    let parsed;
    let items = match value {
        Value::Array(items) => items,
        Value::String(text) => {
            parsed = long_integer::parse(text).ok()?;
            parsed.as_array()?
        }
        _ => return None,
    };
    let column = column.to_owned();
    match items.first() {
        None => Some(messages_in(column)),
        Some(item) if item.get("role").is_some() => Some(messages_in(column)),
        Some(item) if item.get("from").is_some() => Some(RowFormat::ShareGpt(ShareGpt { column })),
        Some(_) => None,
    }
}

fn messages_in(column: String) -> RowFormat {
    RowFormat::Messages(Messages { column, content_key: None })
}

fn alpaca(first_rows: &FirstRows) -> Option<RowFormat> {
    let output = first_rows.first_of(&OUTPUTS)?;
    first_rows.has("instruction").then(|| {
        RowFormat::Alpaca(Alpaca {
            instruction: "instruction".into(),
            input: first_rows.first_of(&INPUTS).map(str::to_owned),
            output: output.into(),
            history: first_rows.first_of(&["history"]).map(str::to_owned),
        })
    })
}

fn pairs(first_rows: &FirstRows) -> Result<Option<RowFormat>, FormatError> {
    let found: Vec<_> = PAIRS.iter().filter(|(p, c)| first_rows.has(p) && first_rows.has(c)).collect();
    match found.as_slice() {
        [] => Ok(None),
        [(prompt, completion)] => Ok(Some(RowFormat::PromptCompletion(PromptCompletionColumns {
            prompt: (*prompt).into(),
            completion: (*completion).into(),
        }))),
        several => {
            let names: Vec<_> = several.iter().map(|(p, c)| format!("{p} and {c}")).collect();
            Err(first_rows
                .unknown(format!("several of its columns could be prompt and completion: {}", names.join("; "))))
        }
    }
}

fn text(first_rows: &FirstRows, request: &FormatRequest) -> Result<RowFormat, FormatError> {
    Ok(text_in(first_rows.require(request.column.as_deref().unwrap_or("text"))?))
}

fn text_in(column: &str) -> RowFormat {
    RowFormat::Text(TextColumn { column: column.to_owned() })
}

fn mapped(
    first_rows: &FirstRows,
    roles: &[(String, String)],
    content_key: Option<&str>,
) -> Result<RowFormat, FormatError> {
    let mapping = RoleMapping::new(roles, content_key)?;
    if let Some(missing) = mapping.columns().find(|column| !first_rows.has(column)) {
        let paste = first_rows.rows.iter().find_map(hints::mapping_of_row);
        let paste = paste.map(|mapping| format!("; for the list that is there write {mapping}"));
        let problem = format!("role_mapping: there is no column {missing:?}{}", first_rows.near(missing));
        return Err(first_rows.unknown(problem + &paste.unwrap_or_default()));
    }
    for (path, found) in mapping.unused(&first_rows.rows) {
        let (n_rows, found) = (first_rows.rows.len(), found.join(", "));
        tracing::warn!("role_mapping: {path} names no message of the first {n_rows} rows; their roles are {found}");
    }
    Ok(RowFormat::RoleMapping(mapping))
}
