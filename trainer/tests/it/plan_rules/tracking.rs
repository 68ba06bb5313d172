//! Experiment trackers: keys, environment variables and credentials.

use std::path::Path;

use trainer::metrics::{Credentials, Secret, TrackingPlan, WandbMode};
use trainer::plan::Plan;
use trainer::recipe::Loaded;
use trainer::resolve::{Environment, TrackingEnv, WorldInfo};

use super::{BASE, known, plan, refused};

/// Returns the environment of the tests with these variables.
fn with(variables: &[(&str, &str)]) -> Environment {
    let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Environment { tracking: TrackingEnv::from_vars(variables), ..known() }
}

fn resolve(variables: &[(&str, &str)], arguments: &[&str]) -> Result<Plan, String> {
    resolve_in(&with(variables), arguments)
}

fn resolve_in(env: &Environment, arguments: &[&str]) -> Result<Plan, String> {
    let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    let loaded = Loaded::parse(Path::new("r.yaml"), BASE.to_owned(), &arguments).map_err(|error| error.to_string())?;
    Plan::resolve(&loaded, env).map_err(|error| error.to_string())
}

#[track_caller]
fn tracking(variables: &[(&str, &str)], arguments: &[&str]) -> TrackingPlan {
    resolve(variables, arguments).unwrap_or_else(|error| panic!("{error}")).log.tracking
}

#[track_caller]
fn refused_with(variables: &[(&str, &str)], arguments: &[&str], want: &[&str]) {
    let message = resolve(variables, arguments).map(|_| "accepted").unwrap_err();
    want.iter().for_each(|part| assert!(message.contains(part), "no {part:?} in:\n{message}"));
}

#[test]
fn report_to_lists_the_trackers() {
    assert_eq!(plan(&[]).log.tracking, TrackingPlan::default());
    assert_eq!(tracking(&[], &["report_to=none"]), TrackingPlan::default());
    let one = tracking(&[], &["report_to=tensorboard"]);
    assert_eq!(one.tensorboard.as_deref(), Some(Path::new("runs/r/tensorboard")));
    let url = [("MLFLOW_TRACKING_URI", "http://host:5000/")];
    let all = tracking(&url, &["report_to=[tensorboard, wandb, mlflow]", "run_name=first"]);
    assert!(all.tensorboard.is_some() && all.wandb.is_some());
    assert_eq!(all.mlflow.unwrap().tracking_uri, "http://host:5000");
    assert_eq!(all.run_name.as_deref(), Some("first"));
    refused(&["report_to=tensorbord"], &["report_to: unknown value \"tensorbord\"", "did you mean `tensorboard`?"]);
    refused(&["report_to=[comet_ml]"], &["values: tensorboard, wandb, mlflow, none"]);
    refused(&["report_to=tensorboard", "output_dir=/dev/null"], &["report_to: tensorboard needs an output_dir"]);
}

#[test]
fn only_rank_0_has_trackers() {
    let world = WorldInfo { rank: 1, ..WorldInfo::first_of(2) };
    let plan = resolve_in(&Environment { world, ..known() }, &["report_to=[tensorboard, wandb, mlflow]"]);
    assert_eq!(plan.unwrap().log.tracking, TrackingPlan::default());
}

#[test]
fn arctic_trainings_wandb_keys_have_their_effect() {
    let keys = "wandb={enable: true, entity: team, project: mine, name: first}";
    let wandb = tracking(&[("WANDB_API_KEY", "k")], &[keys]).wandb.unwrap();
    assert_eq!((wandb.mode, wandb.project.as_str()), (WandbMode::Online, "mine"));
    assert_eq!((wandb.entity.as_deref(), wandb.name.as_deref()), (Some("team"), Some("first")));
    assert_eq!(wandb.folder.as_deref(), Some(Path::new("runs/r/wandb")));
    refused(&["wandb.enable=false", "report_to=wandb"], &["wandb.enable: false contradicts report_to"]);
    let unused = plan(&["wandb={enable: false, project: p}"]);
    assert!(unused.notes.iter().any(|note| note.contains("wandb.project has no effect")), "{:?}", unused.notes);
}

#[test]
fn wandb_variables_apply_where_no_key_is_set() {
    let variables = [
        ("WANDB_API_KEY", "k"),
        ("WANDB_PROJECT", "theirs"),
        ("WANDB_ENTITY", "team"),
        ("WANDB_BASE_URL", "https://wandb.example/"),
        ("WANDB_RUN_ID", "abc"),
        ("WANDB_NAME", "second"),
        ("WANDB_RUN_GROUP", "group"),
        ("WANDB_TAGS", "a,b"),
        ("WANDB_DIR", "/scratch"),
    ];
    let wandb = tracking(&variables, &["report_to=wandb"]).wandb.unwrap();
    assert_eq!((wandb.project.as_str(), wandb.base_url.as_str()), ("theirs", "https://wandb.example"));
    assert_eq!((wandb.run_id.as_deref(), wandb.group.as_deref()), (Some("abc"), Some("group")));
    assert_eq!((wandb.name.as_deref(), wandb.entity.as_deref()), (Some("second"), Some("team")));
    assert_eq!((wandb.tags, wandb.api_key), (vec!["a".to_owned(), "b".to_owned()], Some(Secret::new("k"))));
    assert_eq!(wandb.folder.as_deref(), Some(Path::new("/scratch/wandb")));
    let own = tracking(&variables, &["report_to=wandb", "wandb.project=mine", "run_name=first"]).wandb.unwrap();
    assert_eq!((own.project.as_str(), own.name.as_deref()), ("mine", Some("first")));
}

#[test]
fn wandb_mode_selects_the_upload() {
    let key = ("WANDB_API_KEY", "k");
    let mode = |mode| tracking(&[key, ("WANDB_MODE", mode)], &["report_to=wandb"]).wandb.map(|wandb| wandb.mode);
    assert_eq!(mode("online"), Some(WandbMode::Online));
    assert_eq!(mode("offline"), Some(WandbMode::Offline));
    assert_eq!(mode("disabled"), None);
    assert_eq!(tracking(&[], &["report_to=wandb"]).wandb.unwrap().mode, WandbMode::Offline);
    refused_with(&[("WANDB_MODE", "of")], &["report_to=wandb"], &["WANDB_MODE: expected online, offline or disabled"]);
}

#[test]
fn an_api_key_comes_from_netrc() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(".netrc"), "machine api.wandb.ai login user password k").unwrap();
    let home = [("HOME", dir.path().to_str().unwrap())];
    let wandb = tracking(&home, &["report_to=wandb"]).wandb.unwrap();
    assert_eq!((wandb.mode, wandb.api_key), (WandbMode::Online, Some(Secret::new("k"))));
}

#[test]
fn mlflow_needs_the_url_of_a_server() {
    let report_to = "report_to=mlflow";
    refused(&[report_to], &["report_to: mlflow needs a tracking server", "MLFLOW_TRACKING_URI"]);
    let file = "mlflow.tracking_uri=sqlite:///mlflow.db";
    refused(
        &[report_to, file],
        &["expected an http:// or https:// URL", "mlflow server --backend-store-uri sqlite:///"],
    );
    let password = "mlflow.tracking_uri=http://me:p4ss@host";
    refused(&[report_to, password], &["a recipe cannot contain a password", "MLFLOW_TRACKING_PASSWORD"]);
}

#[test]
fn mlflow_has_the_credentials_of_the_environment() {
    let credentials = |variables: &[(&str, &str)]| {
        let variables = [&[("MLFLOW_TRACKING_URI", "http://host:5000")], variables].concat();
        tracking(&variables, &["report_to=mlflow"]).mlflow.unwrap().credentials
    };
    let basic = |username: &str| Credentials::Basic { username: username.to_owned(), password: Secret::new("p") };
    assert_eq!(credentials(&[]), Credentials::None);
    assert_eq!(credentials(&[("MLFLOW_TRACKING_TOKEN", "t")]), Credentials::Bearer(Secret::new("t")));
    let user = [("MLFLOW_TRACKING_USERNAME", "me"), ("MLFLOW_TRACKING_PASSWORD", "p")];
    assert_eq!(credentials(&user), basic("me"));
    let in_uri = tracking(&[("MLFLOW_TRACKING_URI", "http://you:p@host/ml")], &["report_to=mlflow"]).mlflow.unwrap();
    assert_eq!((in_uri.tracking_uri.as_str(), in_uri.credentials), ("http://host/ml", basic("you")));
}
