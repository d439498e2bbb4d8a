import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.time.Duration;

public class Doctor {
    public static void main(String[] args) {
        var said = "\"error\": \"nothing was asked\"";
        try {
            var client = HttpClient.newBuilder().connectTimeout(Duration.ofSeconds(5)).build();
            var request = HttpRequest.newBuilder(URI.create(args[0])).header(args[1], args[2]);
            var answer = client.send(request.timeout(Duration.ofSeconds(8)).build(), HttpResponse.BodyHandlers.discarding());
            said = "\"code\": \"" + answer.headers().firstValue("x-lessor-error").orElse("") + "\"";
        } catch (Exception error) {
            said = "\"error\": \"" + error.toString().replaceAll("[^ -~]|[\"\\\\]", " ") + "\"";
        }
        System.out.println("{\"way\": \"java\", \"version\": \"" + Runtime.version().feature() + "\", " + said + "}");
        System.exit(0);
    }
}
