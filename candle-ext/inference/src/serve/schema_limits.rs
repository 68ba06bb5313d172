//! Limits on JSON schemas, checked before llguidance compiles them: depth, intersections and divisors.
//!
//! llguidance follows references recursively. It intersects regular expressions before its limits on time apply, in time that is
//! exponential in their number. Its divisors overflow 32 bits.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value as Json};

/// Largest depth in JSON values, with the values that `$ref` refers to. A chain of 64 references through properties fits.
const MAX_DEPTH: usize = 200;

/// Largest number of conditions in [`INTERSECTED`] on one string or number.
const MAX_INTERSECTED: usize = 8;

/// Largest number of combinations of the alternatives in one `allOf`.
const MAX_COMBINATIONS: usize = 1000;

/// Largest least common multiple of divisors, in units of their last decimal place. A compiled one has as many states, of 14 µs.
const MAX_DIVISOR: f64 = 1e4;

/// Largest number of schemas that the check of intersections visits.
const MAX_VISITS: usize = 200_000;

/// Keywords whose regular expressions are intersected.
const INTERSECTED: [&str; 3] = ["pattern", "format", "multipleOf"];

/// Keywords of schemas for parts of a value.
const OF_PARTS: [&str; 5] = ["properties", "patternProperties", "additionalProperties", "items", "prefixItems"];

/// Keywords with alternatives.
const ALTERNATIVES: [&str; 2] = ["anyOf", "oneOf"];

/// Checks the limits of a schema. The error is a sentence.
pub(super) fn check_limits(schema: &Json) -> Result<(), String> {
    ReferenceDepths { root: schema, of_references: HashMap::new() }.below(schema, 0)?;
    let mut check = IntersectionCheck { root: schema, n_visits: 0, seen: HashSet::new(), waiting: Vec::new() };
    check.add(vec![schema]);
    while let Some(schemas) = check.waiting.pop() {
        check.intersection(schemas)?;
    }
    Ok(())
}

/// Returns the value of a reference, as llguidance finds it.
fn referred<'s>(root: &'s Json, reference: &str) -> Option<&'s Json> {
    let path = match reference {
        "#" | "#/" => return Some(root),
        _ => reference.strip_prefix("#/")?,
    };
    path.split('/').try_fold(root, |value, key| match value {
        Json::Array(items) => items.get(key.parse::<usize>().ok()?),
        other => other.get(key),
    })
}

/// Depths of a schema's references.
struct ReferenceDepths<'s> {
    root: &'s Json,
    /// Depth below each reference; 0 while it is measured, because a cycle is compiled once.
    of_references: HashMap<&'s str, usize>,
}

impl<'s> ReferenceDepths<'s> {
    /// Returns the depth of a value that is `above` levels below the root. Fails if the sum exceeds the limit.
    fn below(&mut self, value: &'s Json, above: usize) -> Result<usize, String> {
        let mut deepest = 0;
        match value {
            Json::Object(fields) => {
                for (key, value) in fields {
                    deepest = deepest.max(match value {
                        Json::String(reference) if key == "$ref" => self.below_reference(reference, above + 1)?,
                        _ => self.below(value, above + 1)?,
                    });
                }
            }
            Json::Array(items) => {
                for item in items {
                    deepest = deepest.max(self.below(item, above + 1)?);
                }
            }
            _ => return check_depth(above, 0),
        }
        check_depth(above, deepest + 1)
    }

    fn below_reference(&mut self, reference: &'s str, above: usize) -> Result<usize, String> {
        if let Some(depth) = self.of_references.get(reference) {
            return check_depth(above, *depth);
        }
        self.of_references.insert(reference, 0);
        check_depth(above, 1)?;
        let depth = match referred(self.root, reference) {
            Some(value) => self.below(value, above)?,
            None => 0,
        };
        self.of_references.insert(reference, depth);
        Ok(depth)
    }
}

fn check_depth(above: usize, depth: usize) -> Result<usize, String> {
    match above + depth <= MAX_DEPTH {
        true => Ok(depth),
        false => Err(format!("the schema and its `$ref`s have more than {MAX_DEPTH} levels; use fewer")),
    }
}

/// Sets of schemas that one value must have.
struct IntersectionCheck<'s> {
    root: &'s Json,
    n_visits: usize,
    seen: HashSet<Vec<*const Json>>,
    waiting: Vec<Vec<&'s Json>>,
}

impl<'s> IntersectionCheck<'s> {
    fn add(&mut self, schemas: Vec<&'s Json>) {
        let mut key: Vec<*const Json> = schemas.iter().map(|schema| std::ptr::from_ref(*schema)).collect();
        key.sort_unstable();
        if !key.is_empty() && self.seen.insert(key) {
            self.waiting.push(schemas);
        }
    }

    /// Checks the conditions on a value with all of these schemas, and adds the sets for its parts.
    fn intersection(&mut self, schemas: Vec<&'s Json>) -> Result<(), String> {
        let mut members = self.combined(schemas)?;
        let alternatives: Vec<&Vec<Json>> = ALTERNATIVES
            .iter()
            .flat_map(|key| members.iter().filter_map(|fields| fields.get(*key)?.as_array()))
            .collect();
        let has_conditions = |fields: &&Map<String, Json>| {
            INTERSECTED.iter().chain(&OF_PARTS).any(|keyword| fields.contains_key(*keyword))
        };
        if alternatives.len() == 1 && !members.iter().any(has_conditions) {
            alternatives[0].iter().for_each(|option| self.add(vec![option]));
        } else if !alternatives.is_empty() {
            let n = alternatives.iter().fold(1usize, |n, options| n.saturating_mul(options.len().max(1)));
            if n > MAX_COMBINATIONS {
                return Err(format!(
                    "the schema combines alternatives in {n} ways, at most {MAX_COMBINATIONS} are possible"
                ));
            }
            // An upper limit: each combination has one alternative of each list.
            members.extend(self.combined(alternatives.into_iter().flatten().collect())?);
        }
        check_number(&members)?;
        check_divisors(&members)?;
        self.add_parts(&members);
        Ok(())
    }

    /// Returns the schemas with those that they combine by `allOf` and `$ref`.
    fn combined(&mut self, mut waiting: Vec<&'s Json>) -> Result<Vec<&'s Map<String, Json>>, String> {
        let (mut members, mut seen) = (Vec::new(), HashSet::new());
        while let Some(schema) = waiting.pop() {
            self.n_visits += 1;
            if self.n_visits > MAX_VISITS {
                return Err("the schema has too many combinations of schemas; use fewer".to_owned());
            }
            let Json::Object(fields) = schema else { continue };
            if !seen.insert(std::ptr::from_ref(fields)) {
                continue;
            }
            members.push(fields);
            waiting.extend(fields.get("allOf").and_then(Json::as_array).into_iter().flatten());
            let reference = fields.get("$ref").and_then(Json::as_str);
            waiting.extend(reference.and_then(|reference| referred(self.root, reference)));
        }
        Ok(members)
    }

    /// Adds the schemas of properties and items. Conservatively, those of other properties hold for all, and of items for each.
    fn add_parts(&mut self, members: &[&'s Map<String, Json>]) {
        let of = |keyword: &str| members.iter().filter_map(move |fields| fields.get(keyword)).collect::<Vec<&Json>>();
        let maps = |keyword| of(keyword).into_iter().filter_map(Json::as_object).flatten();
        let mut others = of("additionalProperties");
        others.extend(maps("patternProperties").map(|(_, schema)| schema));
        let mut properties: HashMap<&str, Vec<&Json>> = HashMap::new();
        maps("properties").for_each(|(name, schema)| properties.entry(name).or_default().push(schema));
        let mut items = of("items");
        items.extend(of("prefixItems").into_iter().filter_map(Json::as_array).flatten());
        let is_intersected = members.len() > 1;
        for mut schemas in properties.into_values() {
            if is_intersected {
                schemas.extend(&others);
            }
            self.add(schemas);
        }
        for schemas in [others, items] {
            match is_intersected {
                true => self.add(schemas),
                false => schemas.into_iter().for_each(|schema| self.add(vec![schema])),
            }
        }
    }
}

fn check_number(members: &[&Map<String, Json>]) -> Result<(), String> {
    let count =
        |fields: &&Map<String, Json>| INTERSECTED.iter().filter(|keyword| fields.contains_key(**keyword)).count();
    let n: usize = members.iter().map(count).sum();
    match n <= MAX_INTERSECTED {
        true => Ok(()),
        false => Err(format!(
            "the schema combines {n} of `pattern`, `format` and `multipleOf` for one value, at most {MAX_INTERSECTED} are possible"
        )),
    }
}

/// Checks that the least common multiple of `multipleOf` is small. It is at most all of them multiplied.
fn check_divisors(members: &[&Map<String, Json>]) -> Result<(), String> {
    let divisors: Vec<f64> = members.iter().filter_map(|fields| fields.get("multipleOf")?.as_f64()).collect();
    // 10 to the power of the number of decimal places.
    let scale = |divisor: &f64| (0..=9).map(|n| 10f64.powi(n)).find(|scale| (divisor * scale).fract() == 0.0);
    let unit = divisors.iter().map(|divisor| scale(divisor).unwrap_or(f64::INFINITY)).fold(1.0, f64::max);
    let product: f64 = divisors.iter().map(|divisor| (divisor * unit).max(1.0)).product();
    match divisors.is_empty() || product <= MAX_DIVISOR {
        true => Ok(()),
        false => Err(format!(
            "multipleOf is {}, at most {MAX_DIVISOR} is possible, without the decimal point; combined ones are multiplied",
            divisors.iter().map(f64::to_string).collect::<Vec<_>>().join(" and ")
        )),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns definitions `d0` to `d{n}`, each of which refers to the next.
    fn chain(n: usize, link: impl Fn(Json) -> Json) -> Json {
        let reference = |idx: usize| json!({"$ref": format!("#/$defs/d{idx}")});
        let mut defs: Map<String, Json> = (0..n).map(|idx| (format!("d{idx}"), link(reference(idx + 1)))).collect();
        defs.insert(format!("d{n}"), json!({"type": "string"}));
        json!({"$defs": defs, "$ref": "#/$defs/d0"})
    }

    fn patterns(n: usize) -> Vec<Json> {
        (0..n).map(|idx| json!({"pattern": format!("a{idx}")})).collect()
    }

    #[track_caller]
    fn check(schema: &Json, want: &str) {
        match check_limits(schema) {
            Ok(()) => assert_eq!(want, "", "{schema}"),
            Err(problem) => assert!(!want.is_empty() && problem.contains(want), "{problem}, expected {want}"),
        }
    }

    #[test]
    fn a_chain_of_references_has_a_limit() {
        let through_properties = |next: Json| json!({"type": "object", "properties": {"a": next}});
        check(&chain(60, through_properties), "");
        check(&chain(400, through_properties), "more than 200 levels");
        check(&chain(190, |next| next), "");
        check(&chain(2500, |next| next), "more than 200 levels");
        check(&json!({"$ref": "#"}), "");
        let tree =
            json!({"anyOf": [{"type": "null"}, {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}]});
        check(&tree, "");
        // A property may have the name of a keyword.
        let hidden =
            json!({"properties": {"const": {"$ref": "#/$defs/d0"}}, "$defs": chain(2500, |next| next)["$defs"]});
        check(&hidden, "more than 200 levels");
    }

    #[test]
    fn few_patterns_of_one_value_are_intersected() {
        let want = "for one value, at most 8";
        check(&json!({"type": "string", "allOf": patterns(8)}), "");
        check(&json!({"type": "string", "allOf": patterns(9)}), want);
        check(&json!({"pattern": "b", "allOf": patterns(8)}), want);
        check(&json!({"allOf": [{"allOf": patterns(5)}, {"allOf": patterns(5)}]}), want);
        check(&chain(12, |next| json!({"pattern": "a", "$ref": next["$ref"]})), want);
        check(&json!({"anyOf": patterns(20)}), "");
        check(&json!({"anyOf": [{"allOf": patterns(20)}]}), want);
        check(&json!({"allOf": [{"anyOf": patterns(20)}, {"pattern": "b"}]}), want);
        let of_property: Vec<Json> = patterns(9).into_iter().map(|a| json!({"properties": {"a": a}})).collect();
        check(&json!({"allOf": of_property}), want);
        let of_others: Vec<Json> = patterns(9).into_iter().map(|a| json!({"additionalProperties": a})).collect();
        check(&json!({"allOf": of_others, "properties": {"a": {}}}), want);
        let of_items: Vec<Json> = patterns(9).into_iter().map(|a| json!({"items": a})).collect();
        check(&json!({"allOf": of_items}), want);
        let apart: Map<String, Json> =
            patterns(20).into_iter().enumerate().map(|(i, a)| (format!("k{i}"), a)).collect();
        check(&json!({"properties": apart, "allOf": [{"required": ["k0"]}]}), "");
    }

    #[test]
    fn alternatives_have_few_combinations() {
        let options: Vec<Json> = (0..20).map(|idx| json!({"const": idx})).collect();
        check(&json!({"anyOf": (0..5000).collect::<Vec<_>>()}), "");
        check(&json!({"allOf": [{"anyOf": options}, {"anyOf": options}]}), "");
        check(&json!({"allOf": [{"anyOf": options}, {"anyOf": options}, {"anyOf": options}]}), "8000 ways");
    }

    #[test]
    fn divisors_are_small() {
        for divisor in [json!(7), json!(0.01), json!(10_000), json!(0.5), json!(0)] {
            check(&json!({"properties": {"a": {"multipleOf": divisor}}}), "");
        }
        for divisor in [json!(10_001), json!(4_294_967_296u64), json!(1e-300), json!(1234.56789)] {
            check(&json!({"items": {"multipleOf": divisor}}), "multipleOf is");
        }
        check(&json!({"allOf": [{"multipleOf": 6}, {"multipleOf": 0.5}]}), "");
        check(&json!({"allOf": [{"multipleOf": 65_536}, {"multipleOf": 65_537}]}), "at most 10000");
    }
}
