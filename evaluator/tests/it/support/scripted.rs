//! Model that generates given texts.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use candlewick_model::ParamSpec;
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};
use serde_json::{Value, json};

use super::{export_values, root};

/// Hidden size, and the maximum number of scripted tokens.
const HIDDEN: usize = 64;

/// Texts that a model generates, each after its first token. No token may occur twice.
pub struct Scripted<'a> {
    pub chat_template: &'a str,
    /// Tokens to add to the vocabulary.
    pub added_tokens: &'a [&'a str],
    pub scripts: &'a [&'a str],
}

impl Scripted<'_> {
    /// Writes the model and returns its folder.
    ///
    /// The embedding of a token is a unit vector, which all layers keep. The output layer maps it to the next token.
    pub fn export(&self, folder: &Path) -> PathBuf {
        let tokenizer = self.tokenizer(folder);
        let (mut next, mut unit) = (HashMap::new(), HashMap::new());
        for script in self.scripts {
            let mut ids = tokenizer.encode(script, SpecialTokens::Exclude).unwrap();
            ids.push(tokenizer.token_to_id("<|im_end|>").unwrap());
            for pair in ids.windows(2) {
                assert!(next.insert(pair[0], pair[1]).is_none(), "token {} occurs twice: {script:?}", pair[0]);
                unit.insert(pair[0], unit.len());
            }
        }
        let at = |token: u32, unit: usize| token as usize * HIDDEN + unit;
        let values = |spec: &ParamSpec| {
            let mut values = vec![f32::from(u8::from(spec.name.contains("norm"))); spec.numel()];
            match spec.name.as_str() {
                "model.embed_tokens.weight" => unit.iter().for_each(|(token, unit)| values[at(*token, *unit)] = 1.0),
                "lm_head.weight" => next.iter().for_each(|(token, next)| values[at(*next, unit[token])] = 1.0),
                _ => {}
            }
            values
        };
        let keys = json!({"model_type": "llama", "hidden_size": HIDDEN, "tie_word_embeddings": false});
        let model = export_values(folder, keys, values);
        for entry in fs::read_dir(folder.join("tokenizer")).unwrap().map(|entry| entry.unwrap()) {
            fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
        }
        model
    }

    /// Writes the tokenizer with the added tokens.
    fn tokenizer(&self, folder: &Path) -> Tokenizer {
        let (own, base) = (folder.join("tokenizer"), root().join("recipes/quickstart/tokenizer"));
        fs::create_dir(&own).unwrap();
        fs::copy(base.join("tokenizer_config.json"), own.join("tokenizer_config.json")).unwrap();
        fs::write(own.join("chat_template.jinja"), self.chat_template).unwrap();
        let mut json: Value = serde_json::from_slice(&fs::read(base.join("tokenizer.json")).unwrap()).unwrap();
        let n_vocab = json["model"]["vocab"].as_object().unwrap().len();
        let added = json["added_tokens"].as_array_mut().unwrap();
        added.extend(self.added_tokens.iter().zip(n_vocab..).map(|(token, id)| {
            json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": false,
            })
        }));
        fs::write(own.join("tokenizer.json"), json.to_string()).unwrap();
        Tokenizer::from_directory(own).unwrap()
    }
}
