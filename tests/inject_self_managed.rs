//! A certificate that the injector makes and renews by itself, in a cluster of a double's.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

#[path = "inject_world/cluster.rs"]
mod cluster;
#[path = "inject_world/process.rs"]
mod process;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cluster::{Cluster, certificates};
use http::StatusCode;
use process::{ApiServer, Injector, eventually, post, review};
use rustls::pki_types::CertificateDer;
use serde_json::{Value, json};

async fn replica(cluster: &Cluster, more: &[&str]) -> Injector {
    let args = [cluster.args(), more.iter().map(|arg| (*arg).to_owned()).collect()].concat();
    Injector::start(&args, &cluster.env()).await
}

/// What is shown by a replica, if a webhook's own bundle trusts it.
async fn shown(cluster: &Cluster, replica: &Injector) -> Option<CertificateDer<'static>> {
    let stream = ApiServer::trusting(&cluster.bundle(0)).connect(replica.webhook).await.ok()?;
    stream.get_ref().1.peer_certificates()?.first().cloned()
}

fn leaf(cluster: &Cluster) -> Option<CertificateDer<'static>> {
    certificates(cluster.held("tls.crt").as_bytes()).into_iter().next()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_that_start_at_once_end_with_one_ca() {
    let cluster = Cluster::start().await;
    let (a, b) = tokio::join!(replica(&cluster, &[]), replica(&cluster, &[]));
    for replica in [&a, &b] {
        replica.ready().await;
        assert_eq!(shown(&cluster, replica).await, leaf(&cluster));
        ApiServer::trusting(&cluster.bundle(2)).review(replica.webhook, "first").await.unwrap();
    }
    let roots = cluster.roots();
    assert_eq!(roots.len(), 1);
    assert_eq!((cluster.bundle(0), cluster.bundle(2)), (roots.clone(), roots));
    // What is not ours is left alone.
    assert_eq!(cluster.bundle(1), []);
    {
        let state = cluster.state();
        assert_eq!(state.secret.as_ref().unwrap()["type"], "kubernetes.io/tls");
        let other = &state.configuration.as_ref().unwrap()["webhooks"][1];
        assert_eq!(other["clientConfig"]["service"]["name"], "somebody-elses");
        // It asked for nothing beyond its rights.
        assert!(state.calls.iter().all(|call| !call.contains("DELETE")), "{:?}", state.calls);
    }
    for key in [cluster.held("tls.key"), cluster.held("ca.key")] {
        let line = key.lines().nth(1).unwrap().to_owned();
        assert!(line.len() > 20);
        for replica in [&a, &b] {
            assert!(!replica.log().contains(&line) && !replica.page("/metrics").await.1.contains(&line));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_takes_what_is_there_and_writes_nothing() {
    let cluster = Cluster::start().await;
    let first = replica(&cluster, &[]).await;
    first.ready().await;
    let before = leaf(&cluster);
    drop(first);
    cluster.state().calls.clear();
    let second = replica(&cluster, &[]).await;
    second.ready().await;
    assert_eq!((shown(&cluster, &second).await, leaf(&cluster)), (before.clone(), before));
    let calls = cluster.state().calls.clone();
    assert!(calls.iter().all(|call| call.starts_with("GET ")), "{calls:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_race_is_run_again() {
    let cluster = Cluster::start().await;
    // The first creates nothing, for somebody else made an empty Secret meanwhile; then two more lose.
    cluster.state().races = 3;
    let replica = replica(&cluster, &[]).await;
    replica.ready().await;
    assert_eq!(cluster.state().races, 0);
    assert_eq!(shown(&cluster, &replica).await, leaf(&cluster));
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_api_is_away_what_is_served_stays_served() {
    let cluster = Cluster::start().await;
    cluster.state().away = true;
    let replica = replica(&cluster, &[]).await;
    replica.not_ready("the cluster's version is not known").await;
    cluster.state().away = false;
    replica.ready().await;
    let before = shown(&cluster, &replica).await;
    cluster.state().away = true;
    eventually("it notices", async || replica.log().contains("is looked after again soon").then_some(()))
        .await;
    assert_eq!(replica.page("/readyz").await.0, StatusCode::OK);
    assert_eq!(shown(&cluster, &replica).await, before);
    // A token that was changed meanwhile is read.
    cluster.change_token("token-2");
    let calls = cluster.state().calls.len();
    cluster.state().away = false;
    eventually("it is asked again", async || (cluster.state().calls.len() > calls + 2).then_some(())).await;
    assert_eq!(replica.page("/readyz").await.0, StatusCode::OK);
    assert!(!replica.log().contains("token-"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_is_named() {
    let cluster = Cluster::start().await;
    cluster.state().refuses = Some(StatusCode::FORBIDDEN);
    let replica = replica(&cluster, &["--native=true"]).await;
    replica.not_ready("needs get, create and update of this Secret").await;
    replica.not_ready("Secret lessor/injector-tls was refused with 403").await;
    let kept = cluster.state().configuration.take();
    cluster.state().refuses = None;
    replica.not_ready("MutatingWebhookConfiguration lessor is not there").await;
    let mut strange = kept.clone().unwrap();
    for webhook in strange["webhooks"].as_array_mut().unwrap() {
        webhook["clientConfig"]["service"]["name"] = json!("another");
    }
    cluster.state().configuration = Some(strange);
    replica.not_ready("no webhook that calls Service lessor/injector").await;
    cluster.state().configuration = kept;
    replica.ready().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_that_is_empty_or_broken_is_filled_and_a_bundle_that_was_reset_is_set_again() {
    let cluster = Cluster::start().await;
    cluster.state().secret = Some(json!({ "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
        "metadata": { "name": "injector-tls", "resourceVersion": "1", "labels": { "chart": "lessor" } } }));
    let replica = replica(&cluster, &[]).await;
    replica.ready().await;
    let label =
        |cluster: &Cluster| cluster.state().secret.as_ref().unwrap()["metadata"]["labels"]["chart"].clone();
    assert_eq!(label(&cluster), "lessor");
    // Somebody applies the chart again, with no bundle in it.
    cluster.state().configuration.as_mut().unwrap()["webhooks"][0]["clientConfig"]["caBundle"] = Value::Null;
    eventually("it is there again", async || (cluster.bundle(0) == cluster.roots()).then_some(())).await;
    // And somebody breaks the Secret.
    cluster.state().secret.as_mut().unwrap()["data"]["tls.key"] = json!("bm8ga2V5");
    let mended = async || (shown(&cluster, &replica).await == leaf(&cluster)).then_some(());
    eventually("a key is there", async || cluster.held("tls.key").contains("PRIVATE KEY").then_some(()))
        .await;
    eventually("it is served", mended).await;
    assert_eq!(label(&cluster), "lessor");
}

#[tokio::test(flavor = "multi_thread")]
async fn on_an_older_cluster_sidecars_are_classic() {
    let cluster = Cluster::start().await;
    cluster.state().minor = "28+";
    let replica = replica(&cluster, &[]).await;
    replica.ready().await;
    let api = ApiServer::trusting(&cluster.bundle(0));
    let (_, said) = api.send(replica.webhook, post("/inject", review("u"))).await.unwrap();
    let said: Value = serde_json::from_str(&said).unwrap();
    use base64::Engine as _;
    let patch = said["response"]["patch"].as_str().unwrap();
    let patch = base64::engine::general_purpose::STANDARD.decode(patch).unwrap();
    let patch = String::from_utf8(patch).unwrap();
    assert!(patch.contains("\"/spec/containers/-\"") && patch.contains("--quit"), "{patch}");
    assert!(!patch.contains("initContainers"), "{patch}");
}

/// API servers that ask for reviews all the time, each trusting what the configuration said when it asked.
fn load(
    cluster: &Arc<Cluster>,
    replicas: &Arc<[Injector; 2]>,
    stop: &Arc<AtomicBool>,
    done: &Arc<AtomicUsize>,
) -> Vec<tokio::task::JoinHandle<Result<(), String>>> {
    let one = |asker: usize| {
        let (cluster, replicas) = (cluster.clone(), replicas.clone());
        let (stop, done) = (stop.clone(), done.clone());
        tokio::spawn(async move {
            let mut asked = asker;
            while !stop.load(Ordering::SeqCst) {
                let (read, api) = (Instant::now(), ApiServer::trusting(&cluster.bundle(0)));
                let said = api.review(replicas[asked % 2].webhook, "load").await;
                // On a machine that stood still, what was read is older than what an API server goes by.
                if read.elapsed() < Duration::from_millis(400) {
                    said?;
                    done.fetch_add(1, Ordering::SeqCst);
                }
                asked += 1;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Ok(())
        })
    };
    (0..8).map(one).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn under_load_neither_a_renewal_nor_a_change_of_ca_costs_a_review() {
    let cluster = Arc::new(Cluster::start().await);
    let terms = ["--ca-life=48s", "--leaf-life=12s"];
    let replicas = Arc::new([replica(&cluster, &terms).await, replica(&cluster, &terms).await]);
    for replica in &*replicas {
        replica.ready().await;
    }
    let (stop, done) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let askers = load(&cluster, &replicas, &stop, &done);
    let everywhere = async |leaf: CertificateDer<'static>| {
        for replica in &*replicas {
            eventually("it is served", async || (shown(&cluster, replica).await? == leaf).then_some(()))
                .await;
        }
    };
    // A renewal, by the same CA.
    let (first, old) = (leaf(&cluster).unwrap(), cluster.roots());
    let renewed = eventually("it is renewed", async || leaf(&cluster).filter(|leaf| *leaf != first)).await;
    everywhere(renewed).await;
    assert_eq!(cluster.roots(), old);
    // A change at once: somebody takes the Secret away. The bundle holds both until all is settled.
    cluster.state().secret = None;
    let new = eventually("there is another", async || {
        let roots = cluster.roots();
        (!roots.is_empty() && roots != old).then_some(roots)
    })
    .await;
    eventually("both are trusted", async || {
        let bundle = cluster.bundle(0);
        (bundle.contains(&old[0]) && bundle.contains(&new[0])).then_some(())
    })
    .await;
    everywhere(leaf(&cluster).unwrap()).await;
    eventually("the old one is gone", async || (!cluster.bundle(2).contains(&old[0])).then_some(())).await;
    // A change by the clock: the next CA is published long before it signs.
    eventually("the next one is published", async || {
        (cluster.roots().len() == 2 && cluster.bundle(0) == cluster.roots()).then_some(())
    })
    .await;
    for replica in &*replicas {
        assert_eq!(replica.page("/readyz").await.0, StatusCode::OK);
    }
    stop.store(true, Ordering::SeqCst);
    for asker in askers {
        asker.await.unwrap().unwrap();
    }
    assert!(done.load(Ordering::SeqCst) > 100, "{}", done.load(Ordering::SeqCst));
}

#[tokio::test]
async fn what_it_needs_to_be_told_is_said() {
    let run = |args: &[&str], env: &[(&str, &str)]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_lessor"));
        let done = command.arg("inject").args(args).env_clear().envs(env.iter().copied()).output().unwrap();
        assert_eq!(done.status.code(), Some(2));
        String::from_utf8(done.stderr).unwrap()
    };
    let said = run(&["--self-managed", "--service=x"], &[]);
    for part in ["--namespace", "--tls-secret", "--webhook-configuration"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let all =
        ["--self-managed", "--service=x", "--namespace=x", "--tls-secret=x", "--webhook-configuration=x"];
    assert!(run(&all, &[]).contains("KUBERNETES_SERVICE_HOST"));
    let env = [("KUBERNETES_SERVICE_HOST", "127.0.0.1"), ("KUBERNETES_SERVICE_PORT", "1")];
    assert!(run(&[&all[..], &["--leaf-life=300days"]].concat(), &env).contains("a quarter of --ca-life"));
    assert!(run(&[&all[..], &["--tls-cert=x"]].concat(), &env).contains("--tls-cert"));
}
