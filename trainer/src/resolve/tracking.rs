//! The experiment trackers: `report_to`, `run_name`, `wandb` and `mlflow`.

use std::path::{Path, PathBuf};

use super::TrackingEnv;
use super::resolver::Resolver;
use crate::metrics::{Credentials, MlflowPlan, Secret, TrackingPlan, WandbMode, WandbPlan};
use crate::recipe::{Origin, TrackerName, ValueOrList};

const WANDB_URL: &str = "https://api.wandb.ai";

/// Resolves the trackers. Only the rank that reports has an `output_dir`; the others have none.
pub(super) fn resolve(resolver: &mut Resolver, output_dir: Option<&Path>) -> TrackingPlan {
    let recipe = resolver.recipe();
    let names = resolver.pick("report_to", recipe.report_to.clone(), ValueOrList::Value(TrackerName::None));
    let has = |name: TrackerName| names.values().contains(&name);
    let run_name = text(resolver, "run_name", &recipe.run_name, None);
    let tensorboard = has(TrackerName::Tensorboard).then(|| event_folder(resolver, output_dir)).flatten();
    let is_wandb_on = is_wandb_on(resolver, has(TrackerName::Wandb));
    let wandb = is_wandb_on.then(|| wandb(resolver, run_name.as_ref(), output_dir)).flatten();
    let mlflow = has(TrackerName::Mlflow).then(|| mlflow(resolver)).flatten();
    note_without_effect(resolver, is_wandb_on, has(TrackerName::Mlflow));
    if resolver.env.world.rank > 0 {
        return TrackingPlan::default();
    }
    TrackingPlan { run_name, tensorboard, wandb, mlflow }
}

fn event_folder(resolver: &mut Resolver, output_dir: Option<&Path>) -> Option<PathBuf> {
    if output_dir.is_none() && resolver.env.world.rank == 0 {
        resolver.report(&["report_to"], "report_to: tensorboard needs an output_dir, and it is /dev/null");
    }
    output_dir.map(|dir| dir.join("tensorboard"))
}

/// Returns true if W&B is one of the trackers, by `report_to` or by `wandb.enable`.
fn is_wandb_on(resolver: &mut Resolver, is_listed: bool) -> bool {
    let enable = resolver.recipe().wandb.enable;
    if enable == Some(false) && is_listed {
        resolver.report(&["wandb.enable"], "wandb.enable: false contradicts report_to, which lists wandb");
    }
    enable.is_some_and(|enable| resolver.pick("wandb.enable", Some(enable), false)) || is_listed
}

fn wandb(resolver: &mut Resolver, run_name: Option<&String>, output_dir: Option<&Path>) -> Option<WandbPlan> {
    let (section, env) = (&resolver.recipe().wandb, &resolver.env.tracking);
    let mut mode = match env.get("WANDB_MODE").unwrap_or("online") {
        "online" | "run" => WandbMode::Online,
        "offline" | "dryrun" => WandbMode::Offline,
        "disabled" => {
            resolver.note("W&B is off: WANDB_MODE is disabled");
            return None;
        }
        other => {
            let problem = format!("WANDB_MODE: expected online, offline or disabled, found {other}");
            resolver.report(&["wandb.enable", "report_to"], problem);
            return None;
        }
    };
    let base_url = env.get("WANDB_BASE_URL").unwrap_or(WANDB_URL).trim_end_matches('/');
    let (base_url, in_url) = without_user(base_url);
    let api_key = env.secret("WANDB_API_KEY").or_else(|| env.netrc_password(host(&base_url)));
    let api_key = api_key.or(in_url.map(|(_, password)| password));
    if mode == WandbMode::Online && api_key.is_none() {
        let missing = "W&B: there is no API key, so the run is logged offline; set WANDB_API_KEY or run `wandb login`";
        resolver.note(missing);
        mode = WandbMode::Offline;
    }
    let own = |name: &str| env.get(name).map(str::to_owned);
    let folder = own("WANDB_DIR").map(PathBuf::from).or_else(|| output_dir.map(Path::to_owned));
    let name = text(resolver, "wandb.name", &section.name, None).or_else(|| run_name.cloned());
    Some(WandbPlan {
        mode,
        base_url,
        entity: text(resolver, "wandb.entity", &section.entity, Some("WANDB_ENTITY")),
        project: text(resolver, "wandb.project", &section.project, Some("WANDB_PROJECT"))
            .unwrap_or_else(|| "candlewick".to_owned()),
        name: name.or_else(|| own("WANDB_NAME")),
        run_id: own("WANDB_RUN_ID"),
        group: own("WANDB_RUN_GROUP"),
        job_type: own("WANDB_JOB_TYPE"),
        notes: own("WANDB_NOTES"),
        tags: list(env.get("WANDB_TAGS")),
        folder: folder.map(|folder| folder.join("wandb")),
        api_key,
    })
}

fn mlflow(resolver: &mut Resolver) -> Option<MlflowPlan> {
    const KEYS: [&str; 2] = ["mlflow.tracking_uri", "report_to"];
    let (section, env) = (&resolver.recipe().mlflow, &resolver.env.tracking);
    let is_secret = section.tracking_uri.as_deref().is_some_and(|uri| without_user(uri).1.is_some());
    if is_secret {
        let advice = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD";
        resolver.report_with_advice(&KEYS, "mlflow.tracking_uri: a recipe cannot contain a password", advice);
        return None;
    }
    let Some(uri) =
        text(resolver, KEYS[0], &section.tracking_uri, None).or(env.get("MLFLOW_TRACKING_URI").map(str::to_owned))
    else {
        if resolver.env.world.rank == 0 {
            let advice = "set mlflow.tracking_uri or MLFLOW_TRACKING_URI to http://HOST:PORT";
            resolver.report_with_advice(&KEYS, "report_to: mlflow needs a tracking server", advice);
        }
        return None;
    };
    let (tracking_uri, in_uri) = without_user(uri.trim_end_matches('/'));
    if !tracking_uri.starts_with("http://") && !tracking_uri.starts_with("https://") {
        let advice = format!("start a server with `mlflow server --backend-store-uri {tracking_uri}`, and use its URL");
        let problem = format!("mlflow.tracking_uri: expected an http:// or https:// URL, found {tracking_uri}");
        resolver.report_with_advice(&KEYS, problem, advice);
    }
    if section.tracking_uri.is_none() {
        resolver.record(KEYS[0], tracking_uri.clone(), Origin::Variable("MLFLOW_TRACKING_URI"));
    }
    let experiment = Some("MLFLOW_EXPERIMENT_NAME");
    Some(MlflowPlan {
        tracking_uri,
        experiment_name: text(resolver, "mlflow.experiment_name", &section.experiment_name, experiment)
            .unwrap_or_else(|| "Default".to_owned()),
        run_id: env.get("MLFLOW_RUN_ID").map(str::to_owned),
        credentials: mlflow_credentials(env, in_uri),
    })
}

/// Returns MLflow's credentials. A user name has precedence over a token, as in MLflow's client.
fn mlflow_credentials(env: &TrackingEnv, in_uri: Option<(String, Secret)>) -> Credentials {
    let username = env.get("MLFLOW_TRACKING_USERNAME").map(str::to_owned);
    let given = username.zip(env.secret("MLFLOW_TRACKING_PASSWORD")).or(in_uri);
    match (given, env.secret("MLFLOW_TRACKING_TOKEN")) {
        (Some((username, password)), _) => Credentials::Basic { username, password },
        (None, Some(token)) => Credentials::Bearer(token),
        (None, None) => Credentials::None,
    }
}

fn note_without_effect(resolver: &mut Resolver, is_wandb_on: bool, is_mlflow_on: bool) {
    let keys = [
        ("wandb.entity", is_wandb_on),
        ("wandb.project", is_wandb_on),
        ("wandb.name", is_wandb_on),
        ("mlflow.tracking_uri", is_mlflow_on),
        ("mlflow.experiment_name", is_mlflow_on),
    ];
    for (key, is_on) in keys {
        let tracker = key.split('.').next().unwrap_or(key);
        if !is_on && resolver.loaded.is_set(key) {
            resolver.note(format!("{key} has no effect here: report_to does not list {tracker}"));
        }
    }
}

/// Returns the value of a key, else that of an environment variable. Records it in the table of settings.
fn text(resolver: &mut Resolver, key: &str, given: &Option<String>, variable: Option<&'static str>) -> Option<String> {
    let of_variable = variable.and_then(|name| Some((name, resolver.env.tracking.get(name)?.to_owned())));
    match (given, of_variable) {
        (Some(value), _) => Some(resolver.pick(key, Some(value.clone()), String::new())),
        (None, Some((name, value))) => Some(resolver.record(key, value, Origin::Variable(name))),
        (None, None) => None,
    }
}

fn list(text: Option<&str>) -> Vec<String> {
    let items = text.unwrap_or_default().split(',').map(str::trim);
    items.filter(|item| !item.is_empty()).map(str::to_owned).collect()
}

/// Splits `scheme://user:password@host` into the URL without user and password, and both.
fn without_user(url: &str) -> (String, Option<(String, Secret)>) {
    let split = || {
        let (scheme, rest) = url.split_once("://")?;
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (user, host) = authority.rsplit_once('@')?;
        let (name, password) = user.split_once(':').unwrap_or((user, ""));
        Some((format!("{scheme}://{host}{path}"), Some((name.to_owned(), Secret::new(password)))))
    };
    split().unwrap_or_else(|| (url.to_owned(), None))
}

/// Returns the host of a URL, without port.
fn host(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.split(['/', ':']).next().unwrap_or(rest)
}
