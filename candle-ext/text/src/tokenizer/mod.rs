//! Tokenizers in Hugging Face folders.
//!
//! `tokenizer.json` holds the vocabulary. Other files of the folder hold the roles of special tokens and the chat
//! templates.

mod added_tokens;
mod byte_level_bpe;
mod charsmap;
mod error;
mod files;
mod gguf;
mod growth;
mod special;
mod split_rule;
mod token_bytes;
mod word_cache;

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use crate::catch_panic::catch_panic;
use crate::files::without_bom;
use crate::template::{ChatTemplate, TemplateError};
use byte_level_bpe::ByteLevelBpe;
use files::NamedTemplate;

pub use error::TokenizerError;
pub(crate) use files::read_object as read_json_object;
pub use gguf::{GgufTokenType, GgufVocabulary};
pub use special::{PostProcessorTokens, SpecialToken};

/// Tokenizer with its special tokens and chat templates.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Fast path for byte-level BPE, with the same ids. `None` for other tokenizers.
    words: Option<ByteLevelBpe>,
    directory: PathBuf,
    named: Vec<(String, String)>,
    bos: Option<SpecialToken>,
    eos: Option<SpecialToken>,
    pad: Option<SpecialToken>,
    unk: Option<SpecialToken>,
    eos_ids: BTreeSet<u32>,
    special_ids: BTreeSet<u32>,
    added: PostProcessorTokens,
    templates: Vec<NamedTemplate>,
}

/// Treatment of special tokens: `add_special_tokens` in encoding, the inverse of `skip_special_tokens` in decoding.
///
/// Encoding adds the tokens of the post-processor in tokenizer.json. As in transformers, `add_bos_token` and `add_eos_token`
/// of tokenizer_config.json have no effect: they configure tokenizers without a tokenizer.json.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Encoding adds special tokens, such as BOS, unless the text begins with BOS; decoding keeps them.
    Include,
    /// Encoding adds none; decoding drops special tokens.
    Exclude,
}

/// Token ids of a text and the byte range of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoding {
    /// Token ids, `[n_tokens]`.
    pub ids: Vec<u32>,
    /// Byte range of each token in the text, `[n_tokens]`.
    ///
    /// Tokens that share a character share its bytes. Bytes of dropped characters belong to the next token.
    pub offsets: Vec<Range<usize>>,
}

/// Encoding whose byte ranges cover the whole text.
#[derive(Default)]
struct EncodingBuilder {
    encoded: Encoding,
    covered: usize,
}

impl EncodingBuilder {
    /// Appends a token. Extends its range to the previous one, since post-processors may trim white space.
    fn push(&mut self, id: u32, start: usize, end: usize) {
        self.encoded.ids.push(id);
        self.encoded.offsets.push(start.min(self.covered)..end);
        self.covered = self.covered.max(end);
    }
}

impl Tokenizer {
    /// Measured memory in bytes per token of a BPE vocabulary, with text, merges and tables.
    pub const BYTES_PER_TOKEN: u64 = 400;

    /// Loads a tokenizer folder. Only `tokenizer.json` is required.
    pub fn from_directory(directory: impl AsRef<Path>) -> Result<Self, TokenizerError> {
        let directory = directory.as_ref();
        let inner = load(directory)?;
        let config = files::read_object(&directory.join("tokenizer_config.json"))?;
        let map = files::read_object(&directory.join("special_tokens_map.json"))?;
        let named = special::SpecialTokenConfig::from_configs(&config, &map);
        special::check_roles(directory, &config)?;
        let find = |key| find(&inner, directory, key, named.text(key));
        let (bos, eos, unk) = (find("bos_token")?, find("eos_token")?, find("unk_token")?);
        let pad = find("pad_token")?.or_else(|| eos.clone());

        let around = catch_panic(|| PostProcessorTokens::of(&inner, bos.as_ref()).map_err(|error| error.to_string()));
        let around = around.and_then(|around| around).map_err(|message| TokenizerError::InvalidFile {
            path: directory.join("tokenizer.json"),
            message: format!("it cannot encode a text: {message}"),
        })?;
        around
            .check(&inner)
            .map_err(|message| TokenizerError::InvalidFile { path: directory.join("tokenizer.json"), message })?;

        let mut eos_ids = special::eos_ids(directory)?;
        eos_ids.extend(eos.as_ref().map(|eos| eos.id));
        let added = inner.get_added_tokens_decoder();
        let special_ids = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id);
        Ok(Self {
            special_ids: special_ids.collect(),
            templates: files::chat_templates(directory, &config)?,
            directory: directory.to_owned(),
            added: around,
            named: named.0,
            words: ByteLevelBpe::of(&inner),
            inner,
            bos,
            eos,
            pad,
            unk,
            eos_ids,
        })
    }

    /// Adds the EOS ids of another folder's `generation_config.json` and `config.json`.
    pub fn with_eos_ids_from(mut self, directory: &Path) -> Result<Self, TokenizerError> {
        self.eos_ids.extend(special::eos_ids(directory)?);
        Ok(self)
    }

    /// Sets the folder that errors name, for a tokenizer that was read from a temporary copy.
    #[must_use]
    pub fn with_directory(self, directory: PathBuf) -> Self {
        Self { directory, ..self }
    }

    /// Returns the folder of the tokenizer.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Compiles the chat template of this name, by default `default`. `None` if the folder has no chat template.
    ///
    /// The special tokens become template variables. Without a name, conversations with tools use the template
    /// `tool_use`.
    pub fn chat_template(&self, name: Option<&str>) -> Result<Option<ChatTemplate>, TokenizerError> {
        if self.templates.is_empty() && name.is_none() {
            return Ok(None);
        }
        let wanted = name.unwrap_or("default");
        let found = self.templates.iter().find(|template| template.name == wanted);
        let template = self.compile(found.ok_or_else(|| self.no_template(wanted))?)?;
        let tool_use = self.templates.iter().find(|template| template.name == "tool_use");
        Ok(Some(match tool_use.filter(|_| name.is_none()) {
            Some(tool_use) => template.with_tool_use(self.compile(tool_use)?),
            None => template,
        }))
    }

    /// Returns true if the folder has a chat template of this name.
    pub fn has_chat_template(&self, name: &str) -> bool {
        self.templates.iter().any(|template| template.name == name)
    }

    /// Sets this tokenizer's special tokens (`bos_token`, ...) as template variables.
    #[must_use]
    pub fn with_special_tokens(&self, template: ChatTemplate) -> ChatTemplate {
        let given =
            |template: ChatTemplate, (key, text): &(String, String)| template.with_variable(key.clone(), text.clone());
        let template = self.named.iter().rev().fold(template, given);
        match &self.pad {
            Some(pad) => template.with_variable("pad_token", pad.text.clone()),
            None => template,
        }
    }

    fn compile(&self, template: &NamedTemplate) -> Result<ChatTemplate, TemplateError> {
        Ok(self.with_special_tokens(ChatTemplate::new(template.origin.clone(), &template.source)?))
    }

    fn no_template(&self, name: &str) -> TokenizerError {
        let names: Vec<&str> = self.templates.iter().map(|template| &*template.name).collect();
        TokenizerError::NoTemplate {
            directory: self.directory.clone(),
            name: name.to_owned(),
            available: if names.is_empty() { "none".into() } else { names.join(", ") },
        }
    }

    /// Encodes a text to token ids. Special tokens spelled out in the text become their ids.
    pub fn encode(&self, text: &str, specials: SpecialTokens) -> Result<Vec<u32>, TokenizerError> {
        self.catch_panic("encode", || self.encode_uncaught(text, specials))?
    }

    /// Converts a panic of the tokenizers crate to an error. Some tokenizer.json files cause panics.
    fn catch_panic<T>(&self, action: &'static str, run: impl FnOnce() -> T) -> Result<T, TokenizerError> {
        let (directory, message) = match catch_panic(run) {
            Ok(result) => return Ok(result),
            Err(panic) => (self.directory.clone(), format!("its tokenizer.json is invalid ({panic})")),
        };
        Err(TokenizerError::EncodeOrDecode { directory, action, message })
    }

    fn encode_uncaught(&self, text: &str, specials: SpecialTokens) -> Result<Vec<u32>, TokenizerError> {
        let is_begun = self.bos.as_ref().is_some_and(|bos| text.starts_with(&bos.text));
        let added = Some(&self.added).filter(|_| specials == SpecialTokens::Include && !is_begun);
        let mut ids = added.map_or_else(Vec::new, |added| added.before.clone());
        let n_before = ids.len();
        let words = self.words.as_ref();
        if words.and_then(|words| words.encode(&self.inner, text, |id, _, _| ids.push(id))).is_none() {
            ids.truncate(n_before);
            ids.extend(self.encode_with_tokenizers_crate(text)?);
        }
        ids.extend(added.into_iter().flat_map(|added| &added.after));
        Ok(ids)
    }

    fn encode_with_tokenizers_crate(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self.inner.encode_fast(text, false);
        Ok(encoding.map_err(|error| self.refused("encode", error))?.get_ids().to_vec())
    }

    /// Encodes a text without added special tokens, with the byte range of each token.
    pub fn encode_with_offsets(&self, text: &str) -> Result<Encoding, TokenizerError> {
        self.catch_panic("encode", || self.encode_with_offsets_uncaught(text))?
    }

    fn encode_with_offsets_uncaught(&self, text: &str) -> Result<Encoding, TokenizerError> {
        let mut encoding_builder = EncodingBuilder::default();
        let words = self.words.as_ref();
        match words
            .and_then(|words| words.encode(&self.inner, text, |id, from, to| encoding_builder.push(id, from, to)))
        {
            Some(()) => Ok(encoding_builder.encoded),
            None => self.encode_with_offsets_with_tokenizers_crate(text),
        }
    }

    fn encode_with_offsets_with_tokenizers_crate(&self, text: &str) -> Result<Encoding, TokenizerError> {
        let encoding = self.inner.encode(text, false).map_err(|error| self.refused("encode", error))?;
        let mut encoding_builder = EncodingBuilder::default();
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        tokens.for_each(|(&id, &(start, end))| encoding_builder.push(id, start, end));
        Ok(encoding_builder.encoded)
    }

    /// Decodes token ids to text, with or without special tokens.
    pub fn decode(&self, ids: &[u32], specials: SpecialTokens) -> Result<String, TokenizerError> {
        let text = self.catch_panic("decode", || self.inner.decode(ids, specials == SpecialTokens::Exclude))?;
        text.map_err(|error| self.refused("decode", error))
    }

    fn refused(&self, action: &'static str, error: tokenizers::Error) -> TokenizerError {
        let (directory, message) = (self.directory.clone(), error.to_string());
        TokenizerError::EncodeOrDecode { directory, action, message }
    }

    /// Returns the number of tokens, including added tokens. A model's embedding may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Returns the largest token id plus one: the least number of embedding rows.
    pub fn min_embedding_rows(&self) -> u32 {
        self.inner.get_vocab(true).values().max().map_or(0, |id| id + 1)
    }

    /// Returns the id of a token as spelled in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the token of an id as spelled in the vocabulary.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Returns the BOS token.
    pub fn bos(&self) -> Option<&SpecialToken> {
        self.bos.as_ref()
    }

    /// Returns the EOS token.
    pub fn eos(&self) -> Option<&SpecialToken> {
        self.eos.as_ref()
    }

    /// Returns the padding token, or EOS if none is configured.
    pub fn pad(&self) -> Option<&SpecialToken> {
        self.pad.as_ref()
    }

    /// Returns the token for unknown text.
    pub fn unk(&self) -> Option<&SpecialToken> {
        self.unk.as_ref()
    }

    /// Returns every id that ends generation: EOS, and those of `generation_config.json` and `config.json`.
    pub fn eos_ids(&self) -> &BTreeSet<u32> {
        &self.eos_ids
    }

    /// Returns true if the id belongs to a special token.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.contains(&id)
    }

    /// Returns the special tokens that encoding adds around a text ([`SpecialTokens::Include`]).
    pub fn post_processor_tokens(&self) -> &PostProcessorTokens {
        &self.added
    }

    /// Returns true if the ids begin with BOS twice: once from the text, once added.
    pub fn has_doubled_bos(&self, ids: &[u32]) -> bool {
        let bos = self.bos.as_ref().map(|bos| bos.id);
        bos.is_some_and(|bos| ids.starts_with(&[bos, bos]))
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("directory", &self.directory)
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

fn load(directory: &Path) -> Result<tokenizers::Tokenizer, TokenizerError> {
    let path = directory.join("tokenizer.json");
    let Some(text) = files::read(&path)? else {
        return Err(TokenizerError::NoTokenizerJson {
            directory: directory.to_owned(),
            found: what_is_there(directory).to_owned(),
        });
    };
    let content = |message| TokenizerError::InvalidFile { path: path.clone(), message };
    // The trainer truncates and pads. Files saved during a training may enable both.
    let mut json: Json =
        serde_json::from_slice(without_bom(text.as_bytes())).map_err(|error| content(error.to_string()))?;
    for key in ["truncation", "padding"] {
        if let Some(value) = json.get_mut(key) {
            *value = Json::Null;
        }
    }
    charsmap::check(&json).and_then(|()| growth::check(&json)).map_err(content)?;
    let ids = added_ids(&json);
    let read = catch_panic(|| serde_json::from_value(json).map_err(|error| error.to_string()));
    let inner: tokenizers::Tokenizer = read.and_then(|read| read).map_err(content)?;
    // The tokenizers crate renumbers such an added token and only logs it.
    for (text, id) in ids {
        let own = inner.token_to_id(&text);
        if own.is_some_and(|own| u64::from(own) != id) {
            let own = own.unwrap_or_default();
            return Err(content(format!("added token {text:?} has id {id}, and its place in the vocabulary is {own}")));
        }
    }
    Ok(inner)
}

fn added_ids(json: &Json) -> Vec<(String, u64)> {
    let added = json.get("added_tokens").and_then(Json::as_array).into_iter().flatten();
    added.filter_map(|token| Some((token.get("content")?.as_str()?.to_owned(), token.get("id")?.as_u64()?))).collect()
}

fn what_is_there(directory: &Path) -> &'static str {
    let has = |name: &str| directory.join(name).exists();
    match () {
        () if !directory.exists() => " (the folder does not exist)",
        () if has("tokenizer.model") => " (only tokenizer.model, the sentencepiece form, which has to be converted)",
        () if has("vocab.json") => " (only vocab.json, the older form, which has to be converted)",
        () => "",
    }
}

fn find(
    inner: &tokenizers::Tokenizer,
    directory: &Path,
    key: &'static str,
    text: Option<&str>,
) -> Result<Option<SpecialToken>, TokenizerError> {
    let Some(text) = text else { return Ok(None) };
    match inner.token_to_id(text) {
        Some(id) => Ok(Some(SpecialToken { text: text.to_owned(), id })),
        None => Err(TokenizerError::UnknownToken { directory: directory.to_owned(), key, text: text.to_owned() }),
    }
}
