//! Sources of `type: snowflake`.

use super::resolver::Resolver;
use crate::data::SnowflakePlan;
use crate::recipe::{SourceOptions, SourceType};

/// The keys that select rows, of which a source has one.
const QUERIES: [&str; 3] = ["sql", "table_name", "dataset_uri"];

/// Returns the query of a source of `type: snowflake`. Reports its keys on other sources.
pub(super) fn resolve(resolver: &mut Resolver, path: &str, source: &SourceOptions) -> Option<SnowflakePlan> {
    if source.kind != Some(SourceType::Snowflake) {
        for key in [&QUERIES[..], &["column_mapping", "limit", "batch_size"]].concat() {
            let key = format!("{path}.{key}");
            if resolver.loaded.is_set(&key) {
                resolver.report(&[&key], format!("{key} needs {path}.type: snowflake"));
            }
        }
        return None;
    }
    for key in ["name_or_path", "revision", "subset", "kwargs"] {
        let key = format!("{path}.{key}");
        if resolver.loaded.is_set(&key) {
            resolver.report_with_advice(&[&key], format!("{key} has no meaning for Snowflake"), "remove the key");
        }
    }
    if source.batch_size.is_some() {
        resolver.note(format!("{path}.batch_size has no effect: Snowflake chooses the partitions of a result"));
    }
    Some(SnowflakePlan {
        statement: statement(resolver, path, source)?,
        limit: source.limit.map(|limit| limit.0),
        column_mapping: source.column_mapping.0.clone(),
    })
}

fn statement(resolver: &mut Resolver, path: &str, source: &SourceOptions) -> Option<String> {
    let given = [&source.sql, &source.table_name, &source.dataset_uri];
    if given.iter().filter(|query| query.is_some()).count() != 1 {
        let advice = format!("set {path}.table_name or {path}.sql");
        let message = format!("{path}: expected one of the keys {}", QUERIES.join(", "));
        resolver.report_with_advice(&[path], message, advice);
        return None;
    }
    match given {
        [Some(sql), _, _] => Some(sql.trim().trim_end_matches(';').to_owned()),
        [_, Some(table), _] if table.contains(';') => {
            let key = format!("{path}.table_name");
            resolver.report(&[&key], format!("{key}: expected the name of a table, found {table:?}"));
            None
        }
        [_, Some(table), _] => Some(format!("SELECT * FROM {table}")),
        _ => {
            let key = format!("{path}.dataset_uri");
            let message =
                format!("{key}: a Snowflake Dataset is a set of files, which the SQL REST API does not return");
            resolver.report_with_advice(&[&key], message, "use sql or table_name with the table it was made from");
            None
        }
    }
}
