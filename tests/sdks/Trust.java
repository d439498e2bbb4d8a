// Asks for each address with Java's own client and nothing set in code; prints status and body.
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.time.Duration;

public class Trust {
    public static void main(String[] addresses) throws Exception {
        var client = HttpClient.newBuilder().connectTimeout(Duration.ofSeconds(10)).build();
        for (var address : addresses) {
            var request = HttpRequest.newBuilder(URI.create(address)).timeout(Duration.ofSeconds(20)).build();
            var answer = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.body());
        }
    }
}
