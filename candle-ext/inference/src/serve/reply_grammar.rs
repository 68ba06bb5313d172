//! Grammar of a reply: JSON of a schema, texts and special tokens, after optional thinking.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Map, Value as Json, json};

use crate::reasoning::ReasoningStart;

/// Part of a reply.
#[derive(Clone, Debug)]
pub(super) enum ReplyPart {
    /// A fixed text.
    Text(String),
    /// A special token.
    Token(u32),
    /// JSON of a schema.
    Json(Json),
    /// All of the parts in turn.
    Sequence(Vec<ReplyPart>),
    /// One of the parts.
    OneOf(Vec<ReplyPart>),
    /// Any number of the part.
    Repeated(Box<ReplyPart>),
}

/// White space of JSON between two values: a space, or line breaks with an indentation. Unlimited white space would let a
/// model write nothing else.
const JSON_WHITE_SPACE: &str = r"( |\n{1,2}[ \t]{0,32})";

impl ReplyPart {
    /// Returns the grammar of a reply to a prompt that the model answers with or without thinking.
    pub(super) fn grammar(&self, start: ReasoningStart) -> TopLevelGrammar {
        let mut schemas = Vec::new();
        let reply = self.rule(&mut schemas);
        let start = match start {
            ReasoningStart::None => "reply",
            ReasoningStart::Possible => "(\"<think>\" thinking space?)? reply",
            ReasoningStart::Open => "thinking space? reply",
        };
        let lark = format!(
            "start: {start}\nreply: {reply}\nthinking[suffix=\"</think>\"]: /(?s:.*)/\nspace: /[ \\n]{{1,4}}/\n"
        );
        let schemas = schemas.into_iter().enumerate().map(|(index, schema)| GrammarWithLexer {
            name: Some(format!("json{index}")),
            json_schema: Some(with_options(schema)),
            lark_grammar: None,
        });
        let grammars = std::iter::once(GrammarWithLexer::from_lark(lark)).chain(schemas).collect();
        TopLevelGrammar { grammars, max_tokens: None }
    }

    /// Returns the part in Lark's syntax, and appends its schemas.
    fn rule(&self, schemas: &mut Vec<Json>) -> String {
        let mut rules = |parts: &[Self]| parts.iter().map(|part| part.rule(schemas)).collect::<Vec<String>>();
        match self {
            Self::Text(text) => Json::from(text.as_str()).to_string(),
            Self::Token(id) => format!("<[{id}]>"),
            Self::Sequence(parts) => format!("({})", rules(parts).join(" ")),
            Self::OneOf(parts) => format!("({})", rules(parts).join(" | ")),
            Self::Repeated(part) => format!("({})*", part.rule(schemas)),
            Self::Json(schema) => {
                schemas.push(schema.clone());
                format!("@json{}", schemas.len() - 1)
            }
        }
    }
}

/// Sets llguidance's options, which a schema may have as `x-guidance`.
fn with_options(schema: Json) -> Json {
    let mut fields = match schema {
        Json::Object(fields) => fields,
        Json::Bool(false) => Map::from_iter([("enum".to_owned(), json!([]))]),
        _ => Map::new(),
    };
    fields.insert("x-guidance".to_owned(), json!({"whitespace_pattern": JSON_WHITE_SPACE}));
    Json::Object(fields)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;
    use std::time::{Duration, Instant};

    use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::super::json_schema::constraining;
    use super::*;
    use crate::constraint::{GrammarCompiler, TokenConstraint};
    use crate::sampler::{SamplingParams, TokenSampler};
    use crate::text_stream::StoppableText;

    fn tokenizer() -> Tokenizer {
        Tokenizer::from_directory(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/quickstart/tokenizer"))
            .unwrap()
    }

    fn compiler(tokenizer: &Tokenizer) -> GrammarCompiler {
        // The model has more logits than the tokenizer has tokens.
        GrammarCompiler::new(tokenizer, tokenizer.min_embedding_rows() as usize + 30).unwrap()
    }

    /// Generates a text from random logits. Returns `None` if it has not ended after `n_max` tokens.
    fn generate(tokenizer: &Tokenizer, mut constraint: TokenConstraint, seed: u8, n_max: usize) -> Option<String> {
        let stop_ids: Vec<u32> = tokenizer.eos_ids().iter().copied().collect();
        let mut random = ChaCha8Rng::from_seed([seed; 32]);
        let params = SamplingParams { temperature: 1.0, ..SamplingParams::GREEDY };
        let mut sampler = TokenSampler::new(params, [seed; 32]);
        let mut text = StoppableText::new(tokenizer, &[]);
        let mut written = String::new();
        // Random strings would hardly end.
        let is_end = |id: u32| tokenizer.id_to_token(id).is_some_and(|token| token.contains(['"', '}', ']', '>']));
        let n_vocab = tokenizer.min_embedding_rows() + 30;
        for _ in 0..n_max {
            let logit = |id: u32| random.random_range(-2.0..2.0) + if is_end(id) { 4.0 } else { 0.0 };
            let mut logits: Vec<f32> = (0..n_vocab).map(logit).collect();
            constraint.mask(&mut logits, &stop_ids, &[]).unwrap();
            let token = sampler.sample(&mut logits);
            if stop_ids.contains(&token) {
                return Some(written + &text.finish().unwrap());
            }
            written += &text.push(token).unwrap();
            if constraint.push(token).unwrap() {
                return Some(written + &text.finish().unwrap());
            }
        }
        None
    }

    /// Returns true if a value has the schema. Knows the keywords of the tests.
    fn is_valid(value: &Json, schema: &Json, root: &Json) -> bool {
        let Json::Object(fields) = schema else { return *schema != Json::Bool(false) };
        fields.iter().all(|(keyword, expected)| is_valid_for(keyword, expected, value, schema, root))
    }

    fn is_valid_for(keyword: &str, expected: &Json, value: &Json, schema: &Json, root: &Json) -> bool {
        let number = || expected.as_f64().unwrap();
        let count = || expected.as_u64().unwrap() as usize;
        let valid = |value: &Json, schema: &Json| is_valid(value, schema, root);
        let properties = schema.get("properties").and_then(Json::as_object).cloned().unwrap_or_default();
        let (object, array, text) = (value.as_object(), value.as_array(), value.as_str());
        match keyword {
            "type" => match expected.as_str().unwrap() {
                "object" => value.is_object(),
                "array" => value.is_array(),
                "string" => value.is_string(),
                "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
                "number" => value.is_number(),
                "boolean" => value.is_boolean(),
                _ => value.is_null(),
            },
            "const" => value == expected,
            "enum" => expected.as_array().unwrap().contains(value),
            "anyOf" => expected.as_array().unwrap().iter().any(|schema| valid(value, schema)),
            "$ref" => valid(value, root.pointer(&expected.as_str().unwrap()[1..]).unwrap()),
            "properties" => object.is_none_or(|fields| {
                properties.iter().all(|(name, schema)| fields.get(name).is_none_or(|value| valid(value, schema)))
            }),
            "required" => object.is_none_or(|fields| {
                expected.as_array().unwrap().iter().all(|name| fields.contains_key(name.as_str().unwrap()))
            }),
            "additionalProperties" => object.is_none_or(|fields| {
                fields.iter().all(|(name, value)| properties.contains_key(name) || valid(value, expected))
            }),
            "items" => array.is_none_or(|items| items.iter().all(|item| valid(item, expected))),
            "minItems" => array.is_none_or(|items| items.len() >= count()),
            "maxItems" => array.is_none_or(|items| items.len() <= count()),
            "minLength" => text.is_none_or(|text| text.chars().count() >= count()),
            "maxLength" => text.is_none_or(|text| text.chars().count() <= count()),
            "minimum" => value.as_f64().is_none_or(|value| value >= number()),
            "maximum" => value.as_f64().is_none_or(|value| value <= number()),
            "$defs" | "description" => true,
            _ => panic!("keyword {keyword}"),
        }
    }

    /// Returns a random schema with at most `depth` levels below it.
    fn random_schema(random: &mut ChaCha8Rng, depth: usize) -> Json {
        let low: i32 = random.random_range(-50..50);
        let n = random.random_range(0..4);
        match random.random_range(0..if depth == 0 { 6 } else { 9 }) {
            0 => json!({"type": "string", "minLength": n, "maxLength": n + 9}),
            1 => json!({"type": "integer", "minimum": low, "maximum": low + 200}),
            2 => json!({"type": "number", "minimum": low, "maximum": low + 1}),
            3 => json!({"enum": ["red", "blue \"\u{e9}\n", low, null, [1, {"a": 2}]]}),
            4 => json!({"type": "boolean"}),
            5 => json!({"const": format!("c{low}")}),
            6 => json!({"type": "array", "items": random_schema(random, depth - 1), "minItems": 1, "maxItems": n + 1}),
            7 => json!({"anyOf": [random_schema(random, depth - 1), random_schema(random, depth - 1)]}),
            _ => {
                let mut properties = Map::new();
                (0..=n).for_each(|i| {
                    properties.insert(format!("key {i} é"), random_schema(random, depth - 1));
                });
                let required: Vec<&String> = properties.keys().take(2).collect();
                json!({"type": "object", "properties": properties, "required": required})
            }
        }
    }

    #[test]
    fn texts_of_random_schemas_parse_and_are_valid() {
        let tokenizer = tokenizer();
        let compiler = compiler(&tokenizer);
        let mut random = ChaCha8Rng::from_seed([3; 32]);
        let mut schemas: Vec<Json> = (0..60).map(|_| random_schema(&mut random, 3)).collect();
        schemas.push(json!({"type": "object"}));
        schemas.push(json!({"$defs": {"tree": {"type": "object", "required": ["left"], "additionalProperties": false,
            "properties": {"left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}}}, "$ref": "#/$defs/tree"}));
        let mut n_ended = 0;
        for (seed, schema) in schemas.iter().enumerate() {
            let grammar = ReplyPart::Json(constraining(schema.clone()).unwrap()).grammar(ReasoningStart::None);
            let Some(text) = generate(&tokenizer, compiler.compile(grammar).unwrap(), seed as u8, 150) else {
                continue;
            };
            let value: Json = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text} of {schema}"));
            assert!(is_valid(&value, schema, schema), "{text} of {schema}");
            n_ended += 1;
        }
        assert!(n_ended > 50, "{n_ended} of {} texts ended", schemas.len());
    }

    #[test]
    fn thinking_precedes_the_json_of_a_thinking_model() {
        let tokenizer = tokenizer();
        let compiler = compiler(&tokenizer);
        let accepts = |start, text: &str| {
            let grammar = ReplyPart::Json(json!({"const": 5})).grammar(start);
            let mut constraint = compiler.compile(grammar).unwrap();
            let ids = tokenizer.encode(text, SpecialTokens::Exclude).unwrap();
            ids.iter().all(|id| {
                let mut logits = vec![0.0; tokenizer.min_embedding_rows() as usize];
                constraint.mask(&mut logits, &[], &[]).unwrap();
                logits[*id as usize] == 0.0 && constraint.push(*id).is_ok()
            })
        };
        let thinking = "So <b> \"5\".\n</think>\n\n5";
        for (start, text, want) in [
            (ReasoningStart::None, "5", true),
            (ReasoningStart::None, "<think>5", false),
            (ReasoningStart::Possible, "5", true),
            (ReasoningStart::Possible, &format!("<think>\n{thinking}"), true),
            (ReasoningStart::Possible, "<think></think>5", true),
            (ReasoningStart::Possible, thinking, false),
            (ReasoningStart::Possible, &format!("<think>{thinking}6"), false),
            (ReasoningStart::Open, thinking, true),
            (ReasoningStart::Open, "5", true),
        ] {
            assert_eq!(accepts(start, text), want, "{start:?} {text:?}");
        }
    }

    /// Adds the first possible token, up to `n` times.
    fn walk(constraint: &mut TokenConstraint, n: usize) {
        for _ in 0..n {
            let mut logits = vec![0.0; 600];
            let Ok(()) = constraint.mask(&mut logits, &[], &[]) else { return };
            let Some(id) = logits.iter().position(|logit| *logit == 0.0) else { return };
            if constraint.push(id as u32).unwrap_or(true) {
                return;
            }
        }
    }

    #[test]
    fn hostile_schemas_are_refused_or_bounded_in_time() {
        let tokenizer = tokenizer();
        let compiler = compiler(&tokenizer);
        let mut nested = json!({"type": "string"});
        (0..100).for_each(|_| nested = json!({"type": "array", "items": nested, "minItems": 2}));
        let mut doubled = json!({"properties": {"a": {"type": "string"}}});
        (0..40).for_each(|i| {
            doubled = json!({"allOf": [doubled.clone(), {"properties": {format!("b{i}"): {"type": "number"}}}]})
        });
        let many: Map<String, Json> = (0..3000).map(|i| (format!("key{i}"), json!({"type": "string"}))).collect();
        let pattern = |pattern: &str| json!({"type": "string", "pattern": pattern});
        let pattern_properties: Map<String, Json> =
            (0..20).map(|i| (format!("a{i}"), json!({"type": "null"}))).collect();
        let schemas = [
            nested,
            doubled,
            json!({"type": "object", "properties": many}),
            json!({"enum": (0..20_000).collect::<Vec<_>>()}),
            json!({"$ref": "#"}),
            json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
            json!({"$ref": "https://example.org/schema"}),
            json!({"type": "string", "maxLength": 1_000_000_000}),
            json!({"type": "array", "items": {"type": "string"}, "minItems": 1_000_000_000u64}),
            json!({"type": "array", "items": {"type": "string", "maxLength": 10_000}, "maxItems": 100_000}),
            json!({"type": "object", "minProperties": 1_000_000, "additionalProperties": {"type": "string"}}),
            json!({"type": "number", "multipleOf": 1e-300}),
            json!({"type": "integer", "minimum": -1e308, "maximum": 1e308}),
            pattern("((a{1,100}){1,100}){1,100}"),
            pattern("(x+x+)+y"),
            pattern("(a|b)*a(a|b){30}"),
            pattern(&"(".repeat(10_000)),
            pattern("(?=a)b"),
            pattern("^(\\p{L}{1,1000}){1,1000}$"),
            json!({"type": 5}),
            json!({"properties": []}),
            json!({"enum": []}),
            json!(false),
            json!({"x-guidance": {"whitespace_pattern": "("}}),
            json!({"allOf": (0..8).map(|i| pattern(&format!("a{i}"))).collect::<Vec<_>>()}),
            json!({"allOf": (0..20).map(|i| pattern(&format!("a{i}"))).collect::<Vec<_>>()}),
            json!({"allOf": (0..8).map(|i| pattern(&format!("a{i}(b|c)*d{{3,9}}"))).collect::<Vec<_>>()}),
            json!({"patternProperties": pattern_properties, "additionalProperties": {"type": "string"}}),
            json!({"multipleOf": 9_973}),
        ];
        for schema in schemas {
            let began = Instant::now();
            let Ok(constraining) = constraining(schema.clone()) else { continue };
            let compiled = compiler.compile(ReplyPart::Json(constraining).grammar(ReasoningStart::None));
            let mut shown = schema.to_string();
            shown.truncate(80);
            match compiled {
                Ok(mut constraint) => walk(&mut constraint, 30),
                Err(error) => assert!(error.to_string().len() <= 300 && !error.to_string().contains('\n'), "{error}"),
            }
            assert!(began.elapsed() < Duration::from_secs(60), "{shown}: {:?}", began.elapsed());
        }
    }
}
