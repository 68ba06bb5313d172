//! Chat templates of the program, by name, for models without one.
//!
//! To add one, add a Jinja file and its row in [`BuiltInTemplate::ALL`].

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::ChatTemplate;
use crate::files::{MAX_CONFIG_FILE_BYTES, read_regular_text_file};
use crate::suggestion::did_you_mean;
use crate::tokenizer::{SpecialTokens, Tokenizer, TokenizerError};

/// Chat template of the program.
#[derive(Debug, PartialEq, Eq)]
pub struct BuiltInTemplate {
    /// Name in recipes and options.
    pub name: &'static str,
    /// Jinja source.
    pub source: &'static str,
    /// Markers that must be single tokens. Without them, the markers are plain text.
    pub tokens: &'static [&'static str],
}

/// Declares the templates by name, with the tokens that each needs.
macro_rules! built_in {
    ($($name:literal: $tokens:expr,)*) => {
        &[$(BuiltInTemplate { name: $name, source: include_str!(concat!("built_in/", $name, ".jinja")), tokens: &$tokens }),*]
    };
}

impl BuiltInTemplate {
    /// The templates.
    pub const ALL: &[Self] = built_in![
        "chatml": ["<|im_start|>", "<|im_end|>"],
        "qwen2.5": ["<|im_start|>", "<|im_end|>"],
        "qwen3": ["<|im_start|>", "<|im_end|>"],
        "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "mistral": ["[INST]", "[/INST]"],
        "gemma": ["<start_of_turn>", "<end_of_turn>"],
        "llama2": [],
        "zephyr": [],
        "vicuna": [],
        "alpaca": [],
    ];

    /// Returns the template of this name.
    pub fn find(name: &str) -> Option<&'static Self> {
        Self::ALL.iter().find(|template| template.name == name)
    }

    /// Returns the names of the templates whose markers a tokenizer has, joined by commas.
    pub fn names_for(tokenizer: &Tokenizer) -> String {
        let fits = |template: &&Self| {
            template.missing_tokens(tokenizer).is_empty() && template.other_format(tokenizer).is_none()
        };
        let usable = Self::ALL.iter().filter(fits);
        usable.map(|template| template.name).collect::<Vec<_>>().join(", ")
    }

    /// Checks that each marker is one token, and that turns can end.
    ///
    /// # Errors
    /// If the tokenizer lacks a token. Its text would become ordinary tokens, and generation would not end. If the tokenizer
    /// has the same markers in another format.
    pub fn check(&self, tokenizer: &Tokenizer) -> Result<(), TokenizerError> {
        let (directory, template) = (tokenizer.directory().to_owned(), self.name);
        let usable = || match Self::names_for(tokenizer) {
            names if names.is_empty() => String::new(),
            names => format!("choose a template that fits this tokenizer ({names}), or "),
        };
        let missing = self.missing_tokens(tokenizer);
        if !missing.is_empty() {
            let missing = missing.join(", ");
            return Err(TokenizerError::MissingMarkers { directory, template, missing, usable: usable() });
        }
        match self.other_format(tokenizer) {
            Some(reason) => Err(TokenizerError::OtherMarkerFormat { directory, template, reason, usable: usable() }),
            None => Ok(()),
        }
    }

    /// Returns the reason that a tokenizer with the template's markers has another format.
    fn other_format(&self, tokenizer: &Tokenizer) -> Option<&'static str> {
        let has = |token: &str| tokenizer.token_to_id(token).is_some();
        match self.name {
            "mistral" if has("[SYSTEM_PROMPT]") => {
                Some("its token [SYSTEM_PROMPT] belongs to a later format of Mistral")
            }
            // A vocabulary of byte-level BPE (Tekken) spells its tokens in other characters.
            "mistral" if !has("▁") => Some("it is not SentencePiece, so the spaces around [INST] differ"),
            _ => None,
        }
    }

    fn missing_tokens(&self, tokenizer: &Tokenizer) -> Vec<&'static str> {
        let is_token = |text: &str| {
            let id = tokenizer.token_to_id(text);
            id.is_some() && tokenizer.encode(text, SpecialTokens::Exclude).ok() == id.map(|id| vec![id])
        };
        let mut missing: Vec<&str> = self.tokens.iter().copied().filter(|token| !is_token(token)).collect();
        if self.source.contains("eos_token") && tokenizer.eos().is_none() {
            missing.push("eos_token");
        }
        missing
    }
}

/// Source of a chat template that replaces the tokenizer's own.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChatTemplateSource {
    /// Name of a [`BuiltInTemplate`].
    BuiltIn(String),
    /// Jinja file.
    File(PathBuf),
    /// Jinja text.
    Inline(String),
}

impl ChatTemplateSource {
    /// Reads a name, the path of a file, or a template itself (recognized by `{`). A name has precedence over a file.
    ///
    /// # Errors
    /// If it is none of them. The message completes "failed to start: KEY: ".
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            _ if BuiltInTemplate::find(text).is_some() => Ok(Self::BuiltIn(text.to_owned())),
            _ if text.contains(['{', '\n']) => Ok(Self::Inline(text.to_owned())),
            _ if Path::new(text).is_file() => Ok(Self::File(PathBuf::from(text))),
            _ => {
                let names = BuiltInTemplate::ALL.iter().map(|template| template.name);
                let hint = did_you_mean(text, names.clone());
                let names = names.collect::<Vec<_>>().join(", ");
                Err(format!("`{text}` is neither a built-in template ({names}) nor an existing Jinja file{hint}"))
            }
        }
    }

    /// Returns the name for errors, and the Jinja source.
    ///
    /// # Errors
    /// If the file cannot be read, or a run of another version names a template that this version lacks.
    pub fn read(&self) -> Result<(String, String), TokenizerError> {
        let unread = |path: &Path, source| TokenizerError::Read { path: path.to_owned(), source };
        match self {
            Self::BuiltIn(name) => match BuiltInTemplate::find(name) {
                Some(template) => Ok((name.clone(), template.source.to_owned())),
                None => Err(unread(name.as_ref(), std::io::Error::other("no built-in chat template has this name"))),
            },
            Self::File(path) => match read_regular_text_file(path, MAX_CONFIG_FILE_BYTES) {
                Ok(text) => Ok((path.display().to_string(), text)),
                Err(source) => Err(unread(path, source)),
            },
            Self::Inline(text) => Ok(("tokenizer.chat_template".to_owned(), text.clone())),
        }
    }

    /// Checks that the tokenizer has the markers of a built-in template.
    pub fn check(&self, tokenizer: &Tokenizer) -> Result<(), TokenizerError> {
        match self {
            Self::BuiltIn(name) => BuiltInTemplate::find(name).map_or(Ok(()), |template| template.check(tokenizer)),
            Self::File(_) | Self::Inline(_) => Ok(()),
        }
    }

    /// Compiles the template for a tokenizer, whose special tokens become variables.
    pub fn compile(&self, tokenizer: &Tokenizer) -> Result<ChatTemplate, TokenizerError> {
        self.check(tokenizer)?;
        let (name, source) = self.read()?;
        Ok(tokenizer.with_special_tokens(ChatTemplate::new(name, &source)?))
    }
}
