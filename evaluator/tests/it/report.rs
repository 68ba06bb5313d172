//! HTML reports of `evaluator run` and `evaluator compare`: their contents, and what a browser displays.

use std::fs;

use candlewick_html::browser::{Browser, texts};
use serde_json::{Value, json};

use crate::support::workspace::{Workspace, json_of, success};

/// Document that would run a script if it were not escaped.
const EVIL: &str = "<script>document.title = 'run'</script><!-- <b>&amp; \u{2028}</details>";

/// Returns the documents embedded in the report, in task order.
fn documents(page: &str) -> Vec<Value> {
    let blocks = page.split("class=\"docs\">").skip(1);
    blocks.map(|rest| serde_json::from_str(rest.split("</script>").next().unwrap()).unwrap()).collect()
}

/// Runs `choose` and `speak` with one malicious document, and returns the folder and the report.
fn run(arguments: &[&str]) -> (Workspace, String) {
    let workspace = Workspace::new();
    let text = fs::read_to_string(workspace.path("data.jsonl")).unwrap();
    let mut rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    rows[3]["q"] = json!(EVIL);
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    workspace.write("data.jsonl", &lines.join("\n"));
    success(workspace.run(&[&["--output-path", "out", "--log-samples"], arguments].concat()));
    let page = fs::read_to_string(workspace.written_with("out", "results_", ".html")).unwrap();
    (workspace, page)
}

#[test]
fn the_page_is_whole_and_holds_what_the_records_hold() {
    let (workspace, page) = run(&[]);
    for outside in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
    let scripts = page.matches("<script").count();
    assert_eq!((scripts, page.matches("</script>").count()), (3, 3), "two blocks of documents and the program");
    let [choose, speak] = &documents(&page)[..] else { panic!("{page}") };
    for (name, docs) in [("choose", choose), ("speak", speak)] {
        let records = fs::read_to_string(workspace.written("out", &format!("samples_{name}_"))).unwrap();
        let records: Vec<Value> = records.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(docs.as_array().unwrap().len(), records.len());
        for (doc, record) in docs.as_array().unwrap().iter().zip(&records) {
            assert_eq!(doc["id"], record["doc_id"]);
            assert_eq!(doc["prompt"], record["arguments"]["gen_args_0"]["arg_0"]);
            assert_eq!(doc["target"], record["target"]);
            let metric = record["metrics"][0].as_str().unwrap();
            assert_eq!(doc["filters"][0]["metrics"][metric], record[metric]);
        }
    }
    let record = |key: &str| choose[3]["asked"][1][key].clone();
    assert!(record("logprob").as_f64().unwrap() < 0.0 && record("greedy").is_boolean() && record("prompt").is_null());
    let right: Vec<bool> = choose[3]["asked"].as_array().unwrap().iter().map(|a| a["right"] == true).collect();
    assert_eq!(right, [false, false, false, true]);
    assert!(choose[3]["prompt"].as_str().unwrap().contains(EVIL));
    assert!(speak[0]["asked"][0]["answers"][0].is_string() && speak[0]["filters"][0]["answer"].is_array());
    assert!(page.contains("evaluator run --tasks choose,speak") && page.contains("candlewick"));
    assert!(page.contains("log-likelihood of the correct choice minus that of the likeliest wrong choice"));
    assert!(!page.contains("class=\"left-out\""));
}

#[test]
fn omitted_documents_are_counted() {
    let (_workspace, page) = run(&["--report-samples", "0"]);
    assert_eq!(documents(&page), [json!([]), json!([])]);
    assert_eq!(page.matches("30 of 30 documents are omitted").count(), 2);
}

#[test]
fn a_browser_shows_scores_and_documents() {
    let Some(browser) = Browser::find() else { return };
    let (workspace, _) = run(&[]);
    let page = workspace.written_with("out", "results_", ".html");
    let results = json_of(&workspace.written_with("out", "results_", ".json"));
    let dom = browser.dom(&page, "");
    let value = |task: &str, key: &str| format!("{:.4}", results["results"][task][key].as_f64().unwrap());
    let want = [value("choose", "acc,none"), value("speak", "exact_match,none")];
    assert_eq!(texts(&dom, "<td class=\"number value\""), want);
    let errors = [value("choose", "acc_stderr,none"), value("speak", "exact_match_stderr,none")];
    assert_eq!(texts(&dom, "<td class=\"number stderr\""), errors);
    assert_eq!(dom.matches("<svg class=\"interval").count(), 2);
    assert_eq!(dom.matches("<figure class=\"histogram\"").count(), 2);
    // Each task's list shows its first page; the malicious document is shown as text.
    assert_eq!(dom.matches("<li data-doc=").count(), 50);
    assert_eq!(texts(&dom, "<span class=\"note count\""), ["1–25 of 30", "1–25 of 30"]);
    assert!(texts(&dom, "<title>")[0].ends_with(": evaluation") && !dom.contains("class=\"detail\""));

    let dom = browser.dom(&page, "#task=choose&doc=3");
    let prompts = texts(&dom, "<pre class=\"prompt\"");
    assert_eq!(prompts.len(), 1);
    assert!(prompts[0].contains(EVIL) && texts(&dom, "<title>")[0].ends_with(": evaluation"), "{prompts:?}");
    let detail = &dom[dom.find("class=\"detail\"").unwrap()..];
    let table = &detail[detail.find("<tbody>").unwrap()..detail.find("</tbody>").unwrap()];
    let records = fs::read_to_string(workspace.written("out", "samples_choose_")).unwrap();
    let record: Value = serde_json::from_str(records.lines().nth(3).unwrap()).unwrap();
    let logprob = |i: usize| record["resps"][i][0][0].as_str().unwrap().parse::<f64>().unwrap();
    assert_eq!(texts(table, "<td class=\"number"), [0, 1, 2, 3].map(|i| format!("{:.4}", logprob(i))));
    assert_eq!(table.matches("<tr class=\"right\"").count(), 1);
    assert_eq!(texts(&table[table.find("<tr class=\"right\"").unwrap()..], "<td>")[0], "yes");

    // A link to a document on the second page opens that page.
    let dom = browser.dom(&page, "#task=speak&doc=28");
    assert_eq!(texts(&dom, "<span class=\"note count\""), ["1–25 of 30", "26–30 of 30"]);
    let records = fs::read_to_string(workspace.written("out", "samples_speak_")).unwrap();
    let record: Value = serde_json::from_str(records.lines().nth(28).unwrap()).unwrap();
    assert_eq!(texts(&dom, "<pre class=\"answer\""), [record["resps"][0][0].as_str().unwrap().trim()]);
    assert_eq!(texts(&dom, "<pre class=\"filtered\""), [record["filtered_resps"][0].as_str().unwrap().trim()]);
}

#[test]
fn two_runs_are_compared_on_a_page() {
    let workspace = Workspace::new();
    let record = |i: usize, acc: f64| {
        json!({"doc_id": i, "doc_hash": i.to_string(), "filter": "none", "metrics": ["acc"], "acc": acc}).to_string()
    };
    for (name, right) in [("a", 4), ("b", 9)] {
        fs::create_dir(workspace.path(name)).unwrap();
        let lines: Vec<String> = (0..12).map(|i| record(i, f64::from(u8::from(i < right)))).collect();
        workspace.write(&format!("{name}/samples_<i>_2026.jsonl"), &lines.join("\n"));
    }
    success(workspace.evaluator(&["compare", "a", "b", "--html", "page.html"]).output().unwrap());
    let page = fs::read_to_string(workspace.path("page.html")).unwrap();
    assert!(page.contains("&lt;i&gt;") && !page.contains("<i>"), "{page}");
    assert_eq!(texts(&page, "<td class=\"number value\""), ["+0.4167"]);
    assert_eq!(texts(&page, "<td class=\"flips\""), ["gained 54 5 6 7 8"]);
    assert_eq!(page.matches("<svg class=\"interval sure\"").count(), 1);
    let output = workspace.evaluator(&["compare", "a", "b", "--html", "page.html/page.html"]).output().unwrap();
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("failed to write"));
}
