// cos and sin with an absolute error below 2e-7 for |x| up to 2^20 (GLSL promises 2^-11 within pi).
// Cody-Waite reduction by multiples of pi/2 whose steps are exact without a fused multiply-add: the
// multiple has two halves of 10 bits, the first two constants have 14 bits. Polynomials: Cephes sinf.c.
vec2 cos_sin(float x) {
    const float C1 = 1.5706787109375; // pi/2 = C1 + C2 + C3
    const float C2 = 1.1761486530303955e-4;
    const float C3 = 9.920935796805404e-10;
    precise float k = floor(x * 0.6366197723675814 + 0.5);
    precise float hi = floor(k * (1.0 / 1024.0)) * 1024.0;
    precise float lo = k - hi;
    precise float r = x - hi * C1;
    r = r - lo * C1;
    r = r - hi * C2;
    r = r - lo * C2;
    r = r - k * C3;
    float z = r * r;
    float s = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * r + r;
    float c = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z
        - 0.5 * z + 1.0;
    uint quarter = uint(int(k)) & 3;
    vec2 cs = (quarter & 1) == 0 ? vec2(c, s) : vec2(s, c);
    return vec2((quarter == 1 || quarter == 2) ? -cs.x : cs.x, quarter >= 2 ? -cs.y : cs.y);
}
